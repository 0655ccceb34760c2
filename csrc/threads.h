// Searches on threads of their own. Those of OpenMP are gone in a process that was forked, and who asks for them there waits for
// ever.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

inline int64_t wanted_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// The least of `none` and of what `find(part)`, which throws nothing, gives for the parts from 0 to `parts`, on as many threads as
// OpenMP would have; on fewer where the system gives no more.
template <typename Find> int64_t least_of(int64_t parts, int64_t none, const Find &find) {
    std::atomic<int64_t> next{0}, least{none};
    const auto search = [&] {
        for (int64_t part; (part = next++) < parts;) {
            const int64_t found = find(part);
            for (int64_t before = least; found < before && !least.compare_exchange_weak(before, found);) {
            }
        }
    };
    const int64_t count = std::min(parts, wanted_threads());
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(std::max<int64_t>(count, 1)));
    try {
        while (static_cast<int64_t>(others.size()) + 1 < count) others.emplace_back(search);
    } catch (const std::exception &) { // those that there are do all of it
    }
    search();
    for (std::thread &other : others) other.join();
    return least;
}
