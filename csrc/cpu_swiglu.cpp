// SwiGLU on the CPU: one pass over memory a direction, the activation computed again in backward.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>

#include "cpu_arithmetic.h"
#include "vector_clones.h"

namespace py = pybind11;
using namespace megalite;

namespace {

template <class T>
MEGALITE_INLINE void forward_elements(const T* gate, const T* up, T* y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float g = wide(gate[i]);
        put(y[i], g * sigmoid(g) * wide(up[i]));
    }
}

template <class T>
MEGALITE_INLINE void backward_elements(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float g = wide(gate[i]), grad = wide(dy[i]), s = sigmoid(g), silu = g * s;
        put(dgate[i], grad * wide(up[i]) * (s + silu * (1.0f - s)));
        put(dup[i], grad * silu);
    }
}

#define MEGALITE_SWIGLU(T)                                                                                            \
    MEGALITE_VECTOR void forward_row(const T* gate, const T* up, T* y, int64_t n) { forward_elements(gate, up, y, n); } \
    MEGALITE_VECTOR void backward_row(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {           \
        backward_elements(dy, gate, up, dgate, dup, n);                                                               \
    }
MEGALITE_SWIGLU(float)
MEGALITE_SWIGLU(Bfloat16)
#undef MEGALITE_SWIGLU

template <class T>
void forward(std::uintptr_t gate, int64_t gate_stride, std::uintptr_t up, int64_t up_stride, std::uintptr_t y, int64_t rows, int64_t n,
             int threads) {
    const Rows<const T> gates{reinterpret_cast<const T*>(gate), gate_stride}, ups{reinterpret_cast<const T*>(up), up_stride};
    const Rows<T> ys{reinterpret_cast<T*>(y), n};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) forward_row(gates[row], ups[row], ys[row], n);
}

// dgate and dup are the two halves of one tensor (rows, 2, n).
template <class T>
void backward(std::uintptr_t dy, int64_t dy_stride, std::uintptr_t gate, int64_t gate_stride, std::uintptr_t up, int64_t up_stride,
              std::uintptr_t stacked, int64_t rows, int64_t n, int threads) {
    const Rows<const T> dys{reinterpret_cast<const T*>(dy), dy_stride};
    const Rows<const T> gates{reinterpret_cast<const T*>(gate), gate_stride}, ups{reinterpret_cast<const T*>(up), up_stride};
    const Rows<T> grads{reinterpret_cast<T*>(stacked), 2 * n};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) backward_row(dys[row], gates[row], ups[row], grads[row], grads[row] + n, n);
}

template <class... Arguments>
auto by_dtype(void (*full)(Arguments...), void (*narrow)(Arguments...)) {
    return [=](const std::string& dtype, Arguments... arguments) {
        const py::gil_scoped_release release;
        (dtype == "float32" ? full : narrow)(arguments...);
    };
}

}  // namespace

void bind_cpu_swiglu(py::module_& module) {
    module.def("swiglu_forward", by_dtype(&forward<float>, &forward<Bfloat16>), "See kernels/fused_cpu.py.");
    module.def("swiglu_backward", by_dtype(&backward<float>, &backward<Bfloat16>), "See kernels/fused_cpu.py.");
}
