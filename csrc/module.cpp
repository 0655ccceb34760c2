// The Python module megalite._C: each source file of this folder binds its own functions.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_adamw(py::module_& module);
void bind_cpu_cross_entropy(py::module_& module);
void bind_cpu_rms_norm(py::module_& module);
void bind_cpu_rope(py::module_& module);
void bind_cpu_swiglu(py::module_& module);
void bind_freed_memory(py::module_& module);
void bind_huge_pages(py::module_& module);
void bind_index_builders(py::module_& module);
void bind_indexed_dataset(py::module_& module);
void bind_indexed_writer(py::module_& module);
void bind_json_lines(py::module_& module);
void bind_squared_norm(py::module_& module);

PYBIND11_MODULE(_C, module) {
    module.doc() = "C++ parts of megalite; NumPy arrays in and out.";
    bind_adamw(module);
    bind_cpu_cross_entropy(module);
    bind_cpu_rms_norm(module);
    bind_cpu_rope(module);
    bind_cpu_swiglu(module);
    bind_freed_memory(module);
    bind_huge_pages(module);
    bind_indexed_dataset(module);
    bind_indexed_writer(module);
    bind_index_builders(module);
    bind_json_lines(module);
    bind_squared_norm(module);
}
