// Flat memory handed over by Python, ranges within it, and the chunks in which threads take it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace megalite {

// Elements that a thread takes at once: 28 bytes each stay within the second-level cache.
constexpr int64_t kChunk = 32768;

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

struct Flat {
    std::uintptr_t address;
    int64_t length;
    std::string dtype;
};

inline Flat flat_of(const pybind11::tuple& parts) {
    if (parts.size() != 3) throw std::invalid_argument("flat memory is given as (address, length, dtype)");
    return {parts[0].cast<std::uintptr_t>(), parts[1].cast<int64_t>(), parts[2].cast<std::string>()};
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

inline void check_ranges(const Ranges& ranges, int64_t length, const char* name) {
    int64_t previous = 0;
    for (const auto& [start, stop] : ranges) {
        if (start < previous || stop < start || stop > length)
            throw std::invalid_argument(std::string(name) + ": range [" + std::to_string(start) + ", " + std::to_string(stop) +
                                        ") must be ordered, apart from the others and within " + std::to_string(length) +
                                        " elements");
        previous = stop;
    }
}

}  // namespace megalite
