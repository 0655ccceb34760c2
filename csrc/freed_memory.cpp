// How much freed memory a process keeps for itself instead of handing it back to the system.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace py = pybind11;

namespace {

// The allocator of glibc returns pieces from 128 KiB on, and the end of a heap, at once; what takes their place is then given
// page by page, each filled with zeros first. Other allocators have rules of their own.
void keep_freed_memory([[maybe_unused]] int64_t bytes) {
#ifdef __GLIBC__
    const int most = static_cast<int>(std::min<int64_t>(bytes, 32 << 20)); // more than that is not taken
    mallopt(M_MMAP_THRESHOLD, most);
    mallopt(M_TRIM_THRESHOLD, static_cast<int>(std::min<int64_t>(bytes, INT32_MAX)));
#endif
}

} // namespace

void bind_freed_memory(py::module_ &module) {
    module.def("keep_freed_memory", &keep_freed_memory, py::arg("bytes"), "From now on keep up to `bytes` of freed memory a heap.");
}
