// Asks the system for huge pages under memory that will be read from end to end.
#include <pybind11/pybind11.h>

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace py = pybind11;

namespace {

constexpr std::uintptr_t kHugePage = std::uintptr_t(1) << 21;

// Whole huge pages within the memory only: the edges may belong to others. Advice, hence nothing to report when it is not taken.
void advise_huge_pages([[maybe_unused]] std::uintptr_t address, [[maybe_unused]] std::uintptr_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const std::uintptr_t start = (address + kHugePage - 1) & ~(kHugePage - 1), stop = (address + bytes) & ~(kHugePage - 1);
    if (start < stop) madvise(reinterpret_cast<void*>(start), stop - start, MADV_HUGEPAGE);
#endif
}

}  // namespace

void bind_huge_pages(py::module_& module) {
    module.def("advise_huge_pages", &advise_huge_pages, py::arg("address"), py::arg("bytes"),
               "Ask for huge pages under memory that has not been written to yet.");
}
