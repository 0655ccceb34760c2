// Vocab-parallel cross-entropy on the CPU: the logits are read once forward, read and written once backward.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "cpu_arithmetic.h"
#include "vector_clones.h"

namespace py = pybind11;
using namespace megalite;

namespace {

constexpr int64_t kBlock = 2048;  // columns whose maximum is taken before they are summed: they stay in the first-level cache

struct Statistics {
    float largest, exp_sum, sum;
};

template <class T>
MEGALITE_INLINE Statistics reduce(const T* x, int64_t n) {
    float largest = -std::numeric_limits<float>::infinity(), exp_sum = 0, sum = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const T* block = x + begin;
        const int64_t length = std::min(kBlock, n - begin);
        float high = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : high)
        for (int64_t i = 0; i < length; ++i) high = std::max(high, wide(block[i]));
        if (high > largest) {
            exp_sum *= exponential(largest - high);
            largest = high;
        }
        const float origin = std::isinf(largest) ? 0.0f : largest;
        float exponentials = 0, plain = 0;
#pragma omp simd reduction(+ : exponentials, plain)
        for (int64_t i = 0; i < length; ++i) {
            const float value = wide(block[i]);
            exponentials += exponential(value - origin);
            plain += value;
        }
        exp_sum += exponentials;
        sum += plain;
    }
    return {largest, exp_sum, sum};
}

template <class T>
MEGALITE_INLINE void differentiate(const T* x, T* out, int64_t n, float largest, float log_sum, float scale, float share, float grad) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) put(out[i], (exponential(wide(x[i]) - largest - log_sum) * scale - share) * grad);
}

#define MEGALITE_CROSS_ENTROPY(T)                                                                                               \
    MEGALITE_VECTOR Statistics reduce_row(const T* x, int64_t n) { return reduce(x, n); }                                       \
    MEGALITE_VECTOR void backward_row(const T* x, T* out, int64_t n, float largest, float log_sum, float scale, float share,      \
                                      float grad) {                                                                             \
        differentiate(x, out, n, largest, log_sum, scale, share, grad);                                                         \
    }
MEGALITE_CROSS_ENTROPY(float)
MEGALITE_CROSS_ENTROPY(Bfloat16)
#undef MEGALITE_CROSS_ENTROPY

// statistics (4, rows): maximum, sum of exp(x - maximum), the target's logit if it is here, sum of x.
template <class T>
void statistics(std::uintptr_t logits, int64_t stride, std::uintptr_t target, std::uintptr_t out, int64_t rows, int64_t columns,
                int64_t vocab_start, int64_t ignore_index, int threads) {
    const Rows<const T> xs{reinterpret_cast<const T*>(logits), stride};
    const auto* targets = reinterpret_cast<const int64_t*>(target);
    auto* stats = reinterpret_cast<float*>(out);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const bool ignored = targets[row] == ignore_index;
        const Statistics found = reduce_row(xs[row], ignored ? 0 : columns);
        const int64_t local = targets[row] - vocab_start;
        stats[row] = found.largest;
        stats[rows + row] = found.exp_sum;
        stats[2 * rows + row] = !ignored && local >= 0 && local < columns ? wide(xs[row][local]) : 0.0f;
        stats[3 * rows + row] = found.sum;
    }
}

// grad, and the two parts of normaliser (2, rows), are fp32; out may be the logits.
template <class T>
void backward(std::uintptr_t grad, std::uintptr_t logits, int64_t stride, std::uintptr_t target, std::uintptr_t normaliser,
              std::uintptr_t out, int64_t rows, int64_t width, int64_t columns, int64_t vocab_start, int64_t ignore_index,
              float label_smoothing, float share, float z_loss, int threads) {
    const Rows<const T> xs{reinterpret_cast<const T*>(logits), stride};
    const Rows<T> outs{reinterpret_cast<T*>(out), width};
    const auto* grads = reinterpret_cast<const float*>(grad);
    const auto* targets = reinterpret_cast<const int64_t*>(target);
    const auto* largest = reinterpret_cast<const float*>(normaliser);
    const auto* log_sum = largest + rows;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t local = targets[row] - vocab_start;
        const bool ignored = targets[row] == ignore_index;
        T zero;
        put(zero, 0.0f);
        if (ignored) {
            std::fill(outs[row], outs[row] + width, zero);
            continue;
        }
        const float scale = 1.0f + 2.0f * z_loss * (largest[row] + log_sum[row]);
        const bool owned = local >= 0 && local < columns;
        const float picked = owned ? wide(xs[row][local]) : 0.0f;  // read before a gradient in place overwrites it
        backward_row(xs[row], outs[row], columns, largest[row], log_sum[row], scale, share, grads[row]);
        if (owned) {
            const float p = std::exp(picked - largest[row] - log_sum[row]);
            put(outs[row][local], (p * scale - share - (1.0f - label_smoothing)) * grads[row]);
        }
        std::fill(outs[row] + columns, outs[row] + width, zero);
    }
}

template <class... Arguments>
auto by_dtype(void (*full)(Arguments...), void (*narrow)(Arguments...)) {
    return [=](const std::string& dtype, Arguments... arguments) {
        const py::gil_scoped_release release;
        (dtype == "float32" ? full : narrow)(arguments...);
    };
}

}  // namespace

void bind_cpu_cross_entropy(py::module_& module) {
    module.def("cross_entropy_statistics", by_dtype(&statistics<float>, &statistics<Bfloat16>), "See kernels/fused_cpu.py.");
    module.def("cross_entropy_backward", by_dtype(&backward<float>, &backward<Bfloat16>), "See kernels/fused_cpu.py.");
}
