// The rotary embedding on the CPU, forward and inverse, for q or k of any strides.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <string>

#include "cpu_arithmetic.h"
#include "vector_clones.h"

namespace py = pybind11;
using namespace megalite;

namespace {

template <class T>
MEGALITE_INLINE void rotate(const T* x, const float* cos, const float* sin, float sign, T* y, int64_t half, int64_t dim,
                            bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = wide(x[2 * i]), b = wide(x[2 * i + 1]), c = cos[i], s = sign * sin[i];
            put(y[2 * i], a * c - b * s);
            put(y[2 * i + 1], b * c + a * s);
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
            const float a = wide(x[i]), b = wide(x[half + i]), c = cos[i], s = sign * sin[i];
            put(y[i], a * c - b * s);
            put(y[half + i], b * c + a * s);
        }
    }
    std::memcpy(y + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(T));
}

#define MEGALITE_ROPE(T)                                                                                                             \
    MEGALITE_VECTOR void rotate_head(const T* x, const float* cos, const float* sin, float sign, T* y, int64_t half, int64_t dim,      \
                                     bool interleaved) {                                                                             \
        rotate(x, cos, sin, sign, y, half, dim, interleaved);                                                                        \
    }
MEGALITE_ROPE(float)
MEGALITE_ROPE(Bfloat16)
#undef MEGALITE_ROPE

using Five = std::array<int64_t, 5>;

// x (seq, batch, groups, heads, dim) of unit stride in dim; y contiguous; cos and sin (seq, half) or (seq, batch, half), contiguous.
template <class T>
void apply(std::uintptr_t x, const Five& shape, const Five& stride, std::uintptr_t cos, std::uintptr_t sin, int64_t half,
           bool by_sample, bool interleaved, bool inverse, std::uintptr_t y, int threads) {
    const auto* source = reinterpret_cast<const T*>(x);
    auto* result = reinterpret_cast<T*>(y);
    const auto* cosines = reinterpret_cast<const float*>(cos);
    const auto* sines = reinterpret_cast<const float*>(sin);
    const auto [seq, batch, groups, heads, dim] = shape;
    const float sign = inverse ? -1.0f : 1.0f;
    const int64_t tokens = seq * batch, batches = batch, group_count = groups, head_count = heads, width = dim;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; ++token) {
        const int64_t place = token / batches, sample = token % batches;
        const int64_t table = (by_sample ? token : place) * half;
        const T* from = source + place * stride[0] + sample * stride[1];
        T* to = result + token * group_count * head_count * width;
        for (int64_t group = 0; group < group_count; ++group)
            for (int64_t head = 0; head < head_count; ++head, to += width)
                rotate_head(from + group * stride[2] + head * stride[3], cosines + table, sines + table, sign, to, half, width,
                            interleaved);
    }
}

}  // namespace

void bind_cpu_rope(py::module_& module) {
    module.def(
        "rope",
        [](const std::string& dtype, std::uintptr_t x, const std::array<int64_t, 5>& shape, const std::array<int64_t, 5>& stride,
           std::uintptr_t cos, std::uintptr_t sin, int64_t half, bool by_sample, bool interleaved, bool inverse, std::uintptr_t y,
           int threads) {
            const py::gil_scoped_release release;
            (dtype == "float32" ? &apply<float> : &apply<Bfloat16>)(x, shape, stride, cos, sin, half, by_sample, interleaved, inverse,
                                                                    y, threads);
        },
        "See kernels/fused_cpu.py.");
}
