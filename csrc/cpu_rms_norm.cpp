// RMSNorm on the CPU, with or without a residual added first; one pass over memory a direction, rows stay in cache.
//
// Rows are independent; the weight gradient is summed in fixed blocks of rows, then over blocks in order, so that the number of threads
// changes no bit.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cpu_arithmetic.h"
#include "vector_clones.h"

namespace py = pybind11;
using namespace megalite;

namespace {

constexpr int64_t kBlocks = 64;  // of rows at most, each with a partial weight gradient of its own

template <class T>
MEGALITE_INLINE float square_sum(const T* x, int64_t n) {
    const int64_t half = n / 2;
    float first = 0, second = 0;  // two sums hide the latency of one
#pragma omp simd reduction(+ : first, second)
    for (int64_t i = 0; i < half; ++i) {
        const float a = wide(x[i]), b = wide(x[half + i]);
        first += a * a;
        second += b * b;
    }
    if (n % 2) first += wide(x[n - 1]) * wide(x[n - 1]);
    return first + second;
}

template <class T, class S>
MEGALITE_INLINE void add(const T* x, const S* residual, S* total, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) put(total[i], wide(x[i]) + wide(residual[i]));
}

template <class T, class S>
MEGALITE_INLINE float normalise(const S* source, const float* weight, T* y, int64_t n, float eps) {
    const float rstd = 1.0f / std::sqrt(square_sum(source, n) / float(n) + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) put(y[i], wide(source[i]) * rstd * weight[i]);
    return rstd;
}

template <class T, class S>
MEGALITE_INLINE void differentiate(const T* dy, const S* dtotal, const S* x, const float* weight, float rstd, S* dx, float* dweight,
                                   int64_t n) {
    const int64_t half = n / 2;
    float first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
    for (int64_t i = 0; i < half; ++i) {
        first += wide(dy[i]) * weight[i] * wide(x[i]);
        second += wide(dy[half + i]) * weight[half + i] * wide(x[half + i]);
    }
    if (n % 2) first += wide(dy[n - 1]) * weight[n - 1] * wide(x[n - 1]);
    const float mean = (first + second) * rstd / float(n);
    if (dtotal) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float normal = wide(x[i]) * rstd, grad = wide(dy[i]);
            dweight[i] += grad * normal;
            put(dx[i], (grad * weight[i] - normal * mean) * rstd + wide(dtotal[i]));
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float normal = wide(x[i]) * rstd, grad = wide(dy[i]);
            dweight[i] += grad * normal;
            put(dx[i], (grad * weight[i] - normal * mean) * rstd);
        }
    }
}

// One name for each combination of dtypes: a function template cannot have target clones.
#define MEGALITE_RMS_NORM(T, S)                                                                                               \
    MEGALITE_VECTOR float forward_row(const T* x, const S* residual, S* total, const float* weight, T* y, int64_t n, float eps) { \
        add(x, residual, total, n);                                                                                           \
        return normalise(static_cast<const S*>(total), weight, y, n, eps);                                                    \
    }                                                                                                                         \
    MEGALITE_VECTOR void backward_row(const T* dy, const S* dtotal, const S* x, const float* weight, float rstd, S* dx,         \
                                      float* dweight, int64_t n) {                                                            \
        differentiate(dy, dtotal, x, weight, rstd, dx, dweight, n);                                                           \
    }
MEGALITE_RMS_NORM(float, float)
MEGALITE_RMS_NORM(Bfloat16, Bfloat16)
MEGALITE_RMS_NORM(Bfloat16, float)
#undef MEGALITE_RMS_NORM
MEGALITE_VECTOR float plain_row(const float* x, const float* weight, float* y, int64_t n, float eps) {
    return normalise(x, weight, y, n, eps);
}
MEGALITE_VECTOR float plain_row(const Bfloat16* x, const float* weight, Bfloat16* y, int64_t n, float eps) {
    return normalise(x, weight, y, n, eps);
}
MEGALITE_VECTOR void add_to(float* sum, const float* values, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sum[i] += values[i];
}

template <class T, class S>
void forward(std::uintptr_t x, int64_t x_stride, std::uintptr_t residual, int64_t residual_stride, std::uintptr_t weight,
             std::uintptr_t y, std::uintptr_t total, std::uintptr_t rstd, int64_t rows, int64_t n, float eps, int threads) {
    const Rows<const T> xs{reinterpret_cast<const T*>(x), x_stride};
    const Rows<const S> residuals{reinterpret_cast<const S*>(residual), residual_stride};
    const Rows<T> ys{reinterpret_cast<T*>(y), n};
    const Rows<S> totals{reinterpret_cast<S*>(total), n};
    const auto* weights = reinterpret_cast<const float*>(weight);
    auto* rstds = reinterpret_cast<float*>(rstd);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row)
        rstds[row] = residual ? forward_row(xs[row], residuals[row], totals[row], weights, ys[row], n, eps)
                              : plain_row(xs[row], weights, ys[row], n, eps);
}

template <class T, class S>
void backward(std::uintptr_t dy, int64_t dy_stride, std::uintptr_t dtotal, int64_t dtotal_stride, std::uintptr_t x, int64_t x_stride,
              std::uintptr_t weight, std::uintptr_t rstd, std::uintptr_t dx, std::uintptr_t dweight, int64_t rows, int64_t n,
              int threads) {
    const Rows<const T> dys{reinterpret_cast<const T*>(dy), dy_stride};
    const Rows<const S> dtotals{reinterpret_cast<const S*>(dtotal), dtotal_stride};
    const Rows<const S> xs{reinterpret_cast<const S*>(x), x_stride};
    const Rows<S> dxs{reinterpret_cast<S*>(dx), n};
    const auto* weights = reinterpret_cast<const float*>(weight);
    const auto* rstds = reinterpret_cast<const float*>(rstd);
    auto* sum = reinterpret_cast<float*>(dweight);
    const int64_t block = std::max<int64_t>(1, (rows + kBlocks - 1) / kBlocks), blocks = (rows + block - 1) / block;
    std::vector<float> partial(blocks * n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b)
        for (int64_t row = b * block; row < std::min(rows, (b + 1) * block); ++row)
            backward_row(dys[row], dtotal ? dtotals[row] : nullptr, xs[row], weights, rstds[row], dxs[row], &partial[b * n], n);
    std::fill(sum, sum + n, 0.0f);
    for (int64_t b = 0; b < blocks; ++b) add_to(sum, &partial[b * n], n);
}

template <class... Arguments>
auto by_dtypes(void (*same)(Arguments...), void (*narrow)(Arguments...), void (*mixed)(Arguments...)) {
    return [=](const std::string& branch, const std::string& source, Arguments... arguments) {
        const py::gil_scoped_release release;
        (branch == "float32" ? same : source == "bfloat16" ? narrow : mixed)(arguments...);
    };
}

}  // namespace

void bind_cpu_rms_norm(py::module_& module) {
    module.def("rms_norm_forward",
               by_dtypes(&forward<float, float>, &forward<Bfloat16, Bfloat16>, &forward<Bfloat16, float>),
               "See kernels/fused_cpu.py.");
    module.def("rms_norm_backward",
               by_dtypes(&backward<float, float>, &backward<Bfloat16, Bfloat16>, &backward<Bfloat16, float>),
               "See kernels/fused_cpu.py.");
}
