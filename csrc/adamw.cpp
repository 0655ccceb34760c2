// AdamW and the squared norm over flat buffers, one pass each.
//
// Results do not depend on the number of threads (fixed chunks, partial sums added in chunk order) nor on the vector width chosen at run
// time (no fused multiply-add: setup.py compiles with -ffp-contract=off; fixed lanes in the sum). Element for element, AdamW performs the
// operations of adamw_reference in kernels/adamw.py in the same order, each rounded once.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MEGALITE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEGALITE_CLONES
#endif
#define MEGALITE_INLINE inline __attribute__((always_inline))

constexpr int64_t kChunk = 32768;  // elements a thread takes at once: 28 bytes each stay within the second-level cache

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

// Flat memory handed over by Python: address, number of elements, name of the dtype.
struct Flat {
    std::uintptr_t address;
    int64_t length;
    std::string dtype;
};

template <class T>
struct Scalars {  // the order of kernels.adamw.SCALARS
    T lr, grad_scale, inverse_bias1, inverse_bias2, skip;
};

template <class T>
struct Betas {
    T beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
};

struct NoCast {};  // the weights are the master: nothing to write beside it
struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

MEGALITE_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

MEGALITE_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

MEGALITE_INLINE void cast(float, NoCast&) {}
MEGALITE_INLINE void cast(double, NoCast&) {}

// Round to nearest, ties to even.
MEGALITE_INLINE void cast(float value, Bfloat16& out) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Round to nearest, ties to even; branch-free so that it vectorises without F16C.
MEGALITE_INLINE void cast(float value, Float16& out) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;  // the addition rounds at 2^-24
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t result = magnitude >= 0x47800000u ? special : finite;
    out.bits = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | result);
}

MEGALITE_INLINE NoCast* at(NoCast* out, int64_t) { return out; }
template <class Out>
MEGALITE_INLINE Out* at(Out* out, int64_t index) {
    return out + index;
}

template <class T, class Out>
MEGALITE_INLINE void update(T* __restrict master, Out* __restrict weights, const T* __restrict grads, T* __restrict exp_avg,
                            T* __restrict exp_avg_sq, int64_t length, Scalars<T> s, Betas<T> b, T weight_decay) {
    for (int64_t i = 0; i < length; ++i) {
        const T grad = grads[i] * s.grad_scale;
        const T m = exp_avg[i] * b.beta1 + grad * b.one_minus_beta1;
        const T v = exp_avg_sq[i] * b.beta2 + grad * grad * b.one_minus_beta2;
        const T direction = m * s.inverse_bias1 / (std::sqrt(v * s.inverse_bias2) + b.eps);
        const T w = master[i] - (direction + master[i] * weight_decay) * s.lr;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        master[i] = w;
        cast(w, *at(weights, i));
    }
}

// One name for each combination of dtypes: a function template cannot have target clones.
#define MEGALITE_UPDATE(T, Out)                                                                                            \
    MEGALITE_CLONES void update_clones(T* master, Out* weights, const T* grads, T* exp_avg, T* exp_avg_sq, int64_t length, \
                                       Scalars<T> s, Betas<T> b, T weight_decay) {                                         \
        update<T, Out>(master, weights, grads, exp_avg, exp_avg_sq, length, s, b, weight_decay);                           \
    }
MEGALITE_UPDATE(float, NoCast)
MEGALITE_UPDATE(float, Bfloat16)
MEGALITE_UPDATE(float, Float16)
MEGALITE_UPDATE(double, NoCast)
#undef MEGALITE_UPDATE

template <class T, class Out>
void adamw_typed(T* master, Out* weights, const T* grads, T* exp_avg, T* exp_avg_sq, int64_t length, const T* scalars,
                 double beta1, double beta2, double eps, double weight_decay, const Ranges& decay_ranges, int threads) {
    Scalars<T> s;
    std::memcpy(&s, scalars, sizeof s);
    if (s.skip != T(0)) return;
    const Betas<T> b{T(beta1), T(1.0 - beta1), T(beta2), T(1.0 - beta2), T(eps)};
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
            update_clones(master + begin, at(weights, begin), grads + begin, exp_avg + begin, exp_avg_sq + begin, stop - begin, s,
                          b, inside ? T(weight_decay) : T(0));
            if (inside && stop == range->second) ++range;
            begin = stop;
        }
    }
}

typedef float float8 __attribute__((vector_size(32)));
typedef double double8 __attribute__((vector_size(64)));

MEGALITE_INLINE void load8(const float* source, double8& wide) {
    float8 narrow;
    std::memcpy(&narrow, source, sizeof narrow);
    wide = __builtin_convertvector(narrow, double8);
}

MEGALITE_INLINE void load8(const double* source, double8& wide) { std::memcpy(&wide, source, sizeof wide); }

// Sum of squares in fp64, in 32 fixed lanes: squares of fp32 numbers neither overflow nor round.
template <class T>
MEGALITE_INLINE double sum_of_squares(const T* values, int64_t length) {
    double8 lanes[4] = {};
    int64_t i = 0;
    for (; i + 32 <= length; i += 32) {
        for (int lane = 0; lane < 4; ++lane) {
            double8 x;
            load8(values + i + 8 * lane, x);
            lanes[lane] += x * x;
        }
    }
    const double8 folded = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    double sum = 0;
    for (int lane = 0; lane < 8; ++lane) sum += folded[lane];
    for (; i < length; ++i) sum += double(values[i]) * double(values[i]);
    return sum;
}

MEGALITE_CLONES double sum_of_squares_clones(const float* values, int64_t length) { return sum_of_squares(values, length); }
MEGALITE_CLONES double sum_of_squares_clones(const double* values, int64_t length) { return sum_of_squares(values, length); }

template <class T>
double squared_norm_typed(const T* values, const Ranges& ranges, int threads) {
    Ranges chunks;
    for (const auto& [start, stop] : ranges)
        for (int64_t begin = start; begin < stop; begin += kChunk) chunks.emplace_back(begin, std::min(begin + kChunk, stop));
    const auto count = static_cast<int64_t>(chunks.size());
    std::vector<double> partial(chunks.size());
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t chunk = 0; chunk < count; ++chunk)
        partial[chunk] = sum_of_squares_clones(values + chunks[chunk].first, chunks[chunk].second - chunks[chunk].first);
    double sum = 0;
    for (double value : partial) sum += value;
    return sum;
}

void check_ranges(const Ranges& ranges, int64_t length, const char* name) {
    int64_t previous = 0;
    for (const auto& [start, stop] : ranges) {
        if (start < previous || stop < start || stop > length)
            throw std::invalid_argument(std::string(name) + ": range [" + std::to_string(start) + ", " + std::to_string(stop) +
                                        ") must be ordered, apart from the others and within " + std::to_string(length) +
                                        " elements");
        previous = stop;
    }
}

template <class T>
T* pointer(const Flat& flat, const char* name, const char* dtype, int64_t length) {
    if (flat.dtype != dtype)
        throw std::invalid_argument(std::string(name) + ": dtype is " + flat.dtype + ", must be " + dtype);
    if (flat.length != length)
        throw std::invalid_argument(std::string(name) + ": holds " + std::to_string(flat.length) + " elements, must hold " +
                                    std::to_string(length));
    return reinterpret_cast<T*>(flat.address);
}

template <class T, class Out>
void adamw_checked(const Flat& master, Out* weights, const Flat& grads, const Flat& exp_avg, const Flat& exp_avg_sq,
                   const Flat& scalars, double beta1, double beta2, double eps, double weight_decay, const Ranges& decay_ranges,
                   int threads) {
    const char* dtype = std::is_same<T, float>::value ? "float32" : "float64";
    const int64_t length = master.length;
    T* master_values = pointer<T>(master, "master", dtype, length);
    const T* grad_values = pointer<T>(grads, "grads", dtype, length);
    T* exp_avg_values = pointer<T>(exp_avg, "exp_avg", dtype, length);
    T* exp_avg_sq_values = pointer<T>(exp_avg_sq, "exp_avg_sq", dtype, length);
    const T* scalar_values = pointer<T>(scalars, "scalars", dtype, sizeof(Scalars<T>) / sizeof(T));
    py::gil_scoped_release release;
    adamw_typed(master_values, weights, grad_values, exp_avg_values, exp_avg_sq_values, length, scalar_values, beta1, beta2, eps,
                weight_decay, decay_ranges, threads);
}

Flat flat_of(const py::tuple& parts) {
    if (parts.size() != 3) throw std::invalid_argument("flat memory is given as (address, length, dtype)");
    return {parts[0].cast<std::uintptr_t>(), parts[1].cast<int64_t>(), parts[2].cast<std::string>()};
}

void adamw(const py::tuple& master_parts, const py::object& weights_parts, const py::tuple& grads_parts,
           const py::tuple& exp_avg_parts, const py::tuple& exp_avg_sq_parts, const py::tuple& scalars_parts, double beta1,
           double beta2, double eps, double weight_decay, const Ranges& decay_ranges, int threads) {
    const Flat master = flat_of(master_parts);
    const Flat grads = flat_of(grads_parts), exp_avg = flat_of(exp_avg_parts), exp_avg_sq = flat_of(exp_avg_sq_parts);
    const Flat scalars = flat_of(scalars_parts);
    check_ranges(decay_ranges, master.length, "decay_ranges");
    const auto run = [&](auto element, auto* weights) {
        adamw_checked<decltype(element)>(master, weights, grads, exp_avg, exp_avg_sq, scalars, beta1, beta2, eps, weight_decay,
                                         decay_ranges, threads);
    };
    if (weights_parts.is_none()) {
        NoCast none;
        return master.dtype == "float64" ? run(double(), &none) : run(float(), &none);
    }
    const Flat weights = flat_of(weights_parts.cast<py::tuple>());
    if (weights.dtype == "float16") return run(float(), pointer<Float16>(weights, "weights", "float16", master.length));
    return run(float(), pointer<Bfloat16>(weights, "weights", "bfloat16", master.length));
}

double squared_norm(const py::tuple& values_parts, const Ranges& ranges, int threads) {
    const Flat values = flat_of(values_parts);
    check_ranges(ranges, values.length, "ranges");
    if (values.dtype == "float64") {
        const double* data = pointer<double>(values, "values", "float64", values.length);
        py::gil_scoped_release release;
        return squared_norm_typed(data, ranges, threads);
    }
    const float* data = pointer<float>(values, "values", "float32", values.length);
    py::gil_scoped_release release;
    return squared_norm_typed(data, ranges, threads);
}

}  // namespace

void bind_adamw(py::module_& module) {
    module.def("adamw", &adamw, py::arg("master"), py::arg("weights"), py::arg("grads"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
               py::arg("scalars"), py::kw_only(), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
               py::arg("decay_ranges"), py::arg("threads"),
               "One AdamW step in place. Flat memory is (address, length, dtype); weights is None, or bfloat16 or float16 memory that "
               "receives the rounded master.");
    module.def("squared_norm", &squared_norm, py::arg("values"), py::arg("ranges"), py::kw_only(), py::arg("threads"),
               "Sum of squares, in fp64, of float32 or float64 values in the given ranges; not finite exactly when a value is not "
               "(float32).");
}
