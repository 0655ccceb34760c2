// The sum of squares over ranges of a flat buffer, in one pass.
//
// The result depends neither on the number of threads (fixed chunks, partial sums added in chunk order) nor on the vector width chosen
// at run time (fixed lanes, no fused multiply-add: setup.py compiles with -ffp-contract=off).
#include <algorithm>
#include <cstring>

#include "cpu_arithmetic.h"
#include "flat_memory.h"

namespace py = pybind11;

namespace {

using namespace megalite;

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MEGALITE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEGALITE_CLONES
#endif

typedef uint16_t short8 __attribute__((vector_size(16)));
typedef uint32_t int8 __attribute__((vector_size(32)));
typedef float float8 __attribute__((vector_size(32)));
typedef double double8 __attribute__((vector_size(64)));

MEGALITE_INLINE void load8(const float* source, double8& wide) {
    float8 narrow;
    std::memcpy(&narrow, source, sizeof narrow);
    wide = __builtin_convertvector(narrow, double8);
}

MEGALITE_INLINE void load8(const double* source, double8& wide) { std::memcpy(&wide, source, sizeof wide); }

MEGALITE_INLINE void load8(const Bfloat16* source, double8& wide) {
    short8 halves;
    std::memcpy(&halves, source, sizeof halves);
    const int8 bits = __builtin_convertvector(halves, int8) << 16;
    float8 narrow;
    std::memcpy(&narrow, &bits, sizeof narrow);
    wide = __builtin_convertvector(narrow, double8);
}

MEGALITE_INLINE double exact(double value) { return value; }
MEGALITE_INLINE double exact(float value) { return value; }
MEGALITE_INLINE double exact(Bfloat16 value) { return wide(value); }

// In fp64, in 32 fixed lanes: squares of fp32 numbers neither overflow nor round.
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
    for (; i < length; ++i) sum += exact(values[i]) * exact(values[i]);
    return sum;
}

MEGALITE_CLONES double sum_of_squares_clones(const float* values, int64_t length) { return sum_of_squares(values, length); }
MEGALITE_CLONES double sum_of_squares_clones(const double* values, int64_t length) { return sum_of_squares(values, length); }
MEGALITE_CLONES double sum_of_squares_clones(const Bfloat16* values, int64_t length) { return sum_of_squares(values, length); }

template <class T>
double squared_norm_typed(const T* values, const Ranges& ranges, int threads) {
    py::gil_scoped_release release;
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

double squared_norm(const py::tuple& values_parts, const Ranges& ranges, int threads) {
    const Flat values = flat_of(values_parts);
    check_ranges(ranges, values.length, "ranges");
    if (values.dtype == "float64") return squared_norm_typed(pointer<double>(values, "values", "float64", values.length), ranges, threads);
    if (values.dtype == "bfloat16")
        return squared_norm_typed(pointer<Bfloat16>(values, "values", "bfloat16", values.length), ranges, threads);
    return squared_norm_typed(pointer<float>(values, "values", "float32", values.length), ranges, threads);
}

}  // namespace

void bind_squared_norm(py::module_& module) {
    module.def("squared_norm", &squared_norm, py::arg("values"), py::arg("ranges"), py::kw_only(), py::arg("threads"),
               "Sum of squares, in fp64, of float32, bfloat16 or float64 values in the given ranges; not finite exactly when a value is "
               "not (float32, bfloat16).");
}
