// AdamW over flat buffers, in one pass.
//
// Results do not depend on the number of threads (elements do not meet) nor on the vector width chosen at run time (no fused
// multiply-add: setup.py compiles with -ffp-contract=off). Element for element this performs the operations of adamw_reference in
// kernels/adamw.py in the same order, each rounded once.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "cpu_arithmetic.h"
#include "flat_memory.h"

namespace py = pybind11;

namespace {

using namespace megalite;

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MEGALITE_X86_LEVELS 1
#endif

template <class T>
struct Scalars {  // the order of kernels.adamw.SCALARS
    T lr, grad_scale, inverse_bias1, inverse_bias2, skip;
};

template <class T>
struct Betas {
    T beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
};

struct Float16 {
    uint16_t bits;
};

MEGALITE_INLINE double wide(double value) { return value; }
using megalite::wide;
MEGALITE_INLINE void put(double& out, double value) { out = value; }
using megalite::put;

// The weight that stands for a master: nearest, ties away from zero, see kernels/remainder.py. NaN stays NaN.
MEGALITE_INLINE uint32_t high_half(uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : ((bits + 0x8000u) >> 16) & 0xffffu;
}

MEGALITE_INLINE void put_weight(Bfloat16& out, float value) {
    out.bits = static_cast<uint16_t>(high_half(bits_as<uint32_t>(value)));
}

// Nearest, ties to even; branch-free so that it vectorises without F16C.
MEGALITE_INLINE void put_weight(Float16& out, float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;  // the addition rounds at 2^-24
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t result = magnitude >= 0x47800000u ? special : finite;
    out.bits = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | result);
}

// The three forms of a master weight. Each reads and writes the master of one element.
template <class T>
struct Plain {  // the weights are the master
    using Number = T;
    T* weights;
    MEGALITE_INLINE T load(int64_t i) const { return weights[i]; }
    MEGALITE_INLINE void store(int64_t i, T value) const { weights[i] = value; }
    Plain operator+(int64_t i) const { return {weights + i}; }
};

template <class Weight>
struct Separate {  // a master of its own, and the weights rounded from it
    using Number = float;
    float* master;
    Weight* weights;
    MEGALITE_INLINE float load(int64_t i) const { return master[i]; }
    MEGALITE_INLINE void store(int64_t i, float value) const {
        master[i] = value;
        put_weight(weights[i], value);
    }
    Separate operator+(int64_t i) const { return {master + i, weights + i}; }
};

struct Joined {  // the weights, and the 16 bits of the master below them
    using Number = float;
    Bfloat16* weights;
    uint16_t* remainder;
    MEGALITE_INLINE float load(int64_t i) const {
        const uint32_t low = remainder[i];
        return bits_as<float>(((uint32_t(weights[i].bits) - (low >> 15)) << 16) | low);
    }
    MEGALITE_INLINE void store(int64_t i, float value) const {
        const uint32_t bits = bits_as<uint32_t>(value);
        weights[i].bits = static_cast<uint16_t>(high_half(bits));
        remainder[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0u : bits & 0xffffu);
    }
    Joined operator+(int64_t i) const { return {weights + i, remainder + i}; }
};

template <class Form, class Grad, class First, class Second, class T = typename Form::Number>
MEGALITE_INLINE void update(Form form, const Grad* grads, First* exp_avg, Second* exp_avg_sq, int64_t length, Scalars<T> s,
                            Betas<T> b, T weight_decay) {
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) {
        const T grad = T(wide(grads[i])) * s.grad_scale;
        const T m = wide(exp_avg[i]) * b.beta1 + grad * b.one_minus_beta1;
        const T v = wide(exp_avg_sq[i]) * b.beta2 + grad * grad * b.one_minus_beta2;
        const T direction = m * s.inverse_bias1 / (std::sqrt(v * s.inverse_bias2) + b.eps);
        const T old = form.load(i);
        put(exp_avg[i], m);
        put(exp_avg_sq[i], v);
        form.store(i, old - (direction + old * weight_decay) * s.lr);
    }
}

#ifdef MEGALITE_X86_LEVELS
// A function template cannot have target clones, but it can have a target.
template <class... Arguments>
__attribute__((target("arch=x86-64-v4"))) void update_v4(Arguments... arguments) {
    update(arguments...);
}
template <class... Arguments>
__attribute__((target("arch=x86-64-v3"))) void update_v3(Arguments... arguments) {
    update(arguments...);
}
#endif

template <class... Arguments>
void update_at_best_width(Arguments... arguments) {
#ifdef MEGALITE_X86_LEVELS
    if (__builtin_cpu_supports("x86-64-v4")) return update_v4(arguments...);
    if (__builtin_cpu_supports("x86-64-v3")) return update_v3(arguments...);
#endif
    update(arguments...);
}

template <class Form, class Grad, class First, class Second, class T = typename Form::Number>
void adamw_typed(Form form, const Grad* grads, First* exp_avg, Second* exp_avg_sq, int64_t length, const T* scalars,
                 const std::array<double, 4>& constants, const Ranges& decay_ranges, int threads) {
    py::gil_scoped_release release;
    Scalars<T> s;
    std::memcpy(&s, scalars, sizeof s);
    if (s.skip != T(0)) return;
    const auto [beta1, beta2, eps, weight_decay] = constants;
    const Betas<T> b{T(beta1), T(1.0 - beta1), T(beta2), T(1.0 - beta2), T(eps)};
    const T decay = T(weight_decay);
    const int64_t chunks = (length + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        int64_t begin = chunk * kChunk;
        const int64_t end = std::min(begin + kChunk, length);
        auto range = std::upper_bound(decay_ranges.begin(), decay_ranges.end(), begin,
                                      [](int64_t place, const auto& r) { return place < r.second; });
        while (begin < end) {  // pieces that lie wholly inside or outside a decayed range
            const bool last = range == decay_ranges.end();
            const bool inside = !last && begin >= range->first;
            const int64_t stop = last ? end : std::min(end, inside ? range->second : range->first);
            update_at_best_width(form + begin, grads + begin, exp_avg + begin, exp_avg_sq + begin, stop - begin, s, b,
                                 inside ? decay : T(0));
            if (inside && stop == range->second) ++range;
            begin = stop;
        }
    }
}

// Calls `work` with a float* or Bfloat16* to the memory, as its dtype says.
template <class Work>
void fp32_or_bf16(const Flat& flat, const char* name, int64_t length, const Work& work) {
    if (flat.dtype == "bfloat16") return work(pointer<Bfloat16>(flat, name, "bfloat16", length));
    work(pointer<float>(flat, name, "float32", length));
}

struct Call {
    Flat grads, exp_avg, exp_avg_sq, scalars;
    std::array<double, 4> constants;
    const Ranges& decay_ranges;
    int threads;
};

template <class Form>
void run_float(Form form, const Call& call, int64_t length) {
    const float* scalars = pointer<float>(call.scalars, "scalars", "float32", sizeof(Scalars<float>) / sizeof(float));
    fp32_or_bf16(call.grads, "grads", length, [&](const auto* grads) {
        fp32_or_bf16(call.exp_avg, "exp_avg", length, [&](auto* exp_avg) {
            fp32_or_bf16(call.exp_avg_sq, "exp_avg_sq", length, [&](auto* exp_avg_sq) {
                adamw_typed(form, grads, exp_avg, exp_avg_sq, length, scalars, call.constants, call.decay_ranges, call.threads);
            });
        });
    });
}

void run_double(Plain<double> form, const Call& call, int64_t length) {
    const auto at = [&](const Flat& flat, const char* name) { return pointer<double>(flat, name, "float64", length); };
    const double* scalars = pointer<double>(call.scalars, "scalars", "float64", sizeof(Scalars<double>) / sizeof(double));
    const double* grads = at(call.grads, "grads");
    adamw_typed(form, grads, at(call.exp_avg, "exp_avg"), at(call.exp_avg_sq, "exp_avg_sq"), length, scalars, call.constants,
                call.decay_ranges, call.threads);
}

void adamw(const py::tuple& weights_parts, const py::object& master_parts, const py::object& remainder_parts,
           const py::tuple& grads_parts, const py::tuple& exp_avg_parts, const py::tuple& exp_avg_sq_parts,
           const py::tuple& scalars_parts, double beta1, double beta2, double eps, double weight_decay, const Ranges& decay_ranges,
           int threads) {
    const Flat weights = flat_of(weights_parts);
    const int64_t length = weights.length;
    const Call call{flat_of(grads_parts), flat_of(exp_avg_parts), flat_of(exp_avg_sq_parts), flat_of(scalars_parts),
                    {beta1, beta2, eps, weight_decay}, decay_ranges, threads};
    check_ranges(decay_ranges, length, "decay_ranges");
    if (!remainder_parts.is_none()) {
        const Flat remainder = flat_of(remainder_parts.cast<py::tuple>());
        return run_float(Joined{pointer<Bfloat16>(weights, "weights", "bfloat16", length),
                                pointer<uint16_t>(remainder, "remainder", "int16", length)},
                         call, length);
    }
    if (!master_parts.is_none()) {
        float* master = pointer<float>(flat_of(master_parts.cast<py::tuple>()), "master", "float32", length);
        if (weights.dtype == "float16")
            return run_float(Separate<Float16>{master, pointer<Float16>(weights, "weights", "float16", length)}, call, length);
        return run_float(Separate<Bfloat16>{master, pointer<Bfloat16>(weights, "weights", "bfloat16", length)}, call, length);
    }
    if (weights.dtype == "float64")
        return run_double(Plain<double>{pointer<double>(weights, "weights", "float64", length)}, call, length);
    run_float(Plain<float>{pointer<float>(weights, "weights", "float32", length)}, call, length);
}

}  // namespace

void bind_adamw(py::module_& module) {
    module.def("adamw", &adamw, py::arg("weights"), py::arg("master"), py::arg("remainder"), py::arg("grads"), py::arg("exp_avg"),
               py::arg("exp_avg_sq"), py::arg("scalars"), py::kw_only(), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
               py::arg("weight_decay"), py::arg("decay_ranges"), py::arg("threads"),
               "One AdamW step in place. Flat memory is (address, length, dtype). Either the weights are the master, or master is float32 "
               "memory beside bfloat16 or float16 weights, or remainder is int16 memory below bfloat16 weights.");
}
