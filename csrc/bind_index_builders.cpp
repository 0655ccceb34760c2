// Python bindings of the index builders: they fill arrays that the caller made, without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "data_error.h"
#include "index_builders.h"

namespace py = pybind11;

namespace {

template <typename T> using Dense = py::array_t<T, py::array::c_style>;
using Dataset = std::shared_ptr<IndexedDataset>;

void document_index(Dense<int32_t> &out, int64_t first, int64_t last, int64_t epochs, bool separate, LegacyShuffler &shuffler) {
    if (first < 0 || last < first || epochs < 1 || out.size() != (last - first) * epochs)
        fail("fill_document_index: expected an array of ", (last - first) * epochs, " entries, found ", out.size());
    int32_t *data = out.mutable_data();
    py::gil_scoped_release release;
    fill_document_index(data, first, last - first, epochs, separate, shuffler);
}

template <typename T>
void sample_index(Dense<T> &out, const Dataset &dataset, const Dense<int32_t> &documents, int64_t seq_length) {
    if (out.ndim() != 2 || out.shape(1) != 2 || out.shape(0) < 1) fail("fill_sample_index: expected an array (samples + 1, 2)");
    T *data = out.mutable_data();
    py::gil_scoped_release release;
    fill_sample_index<T>(data, out.shape(0) - 1, *dataset, documents.data(), documents.size(), seq_length);
}

template <typename T> void shuffle_index(Dense<T> &out, int64_t boundary, LegacyShuffler &shuffler) {
    if (boundary < 0 || boundary > out.size()) fail("fill_shuffle_index: boundary ", boundary, " outside 0 to ", out.size());
    T *data = out.mutable_data();
    py::gil_scoped_release release;
    fill_shuffle_index<T>(data, out.size(), boundary, shuffler);
}

void blend(Dense<int16_t> &dataset_index, Dense<int64_t> &dataset_sample_index, const Dense<double> &weights) {
    if (dataset_index.size() != dataset_sample_index.size()) fail("fill_blend: two arrays of one length expected");
    if (weights.size() < 1 || weights.size() > 32767) fail("a blend has 1 to 32767 datasets, found ", weights.size());
    int16_t *datasets = dataset_index.mutable_data();
    int64_t *samples = dataset_sample_index.mutable_data();
    py::gil_scoped_release release;
    fill_blend(datasets, samples, weights.data(), weights.size(), dataset_index.size());
}

void exhaustive_blend(Dense<int16_t> &dataset_index, Dense<int64_t> &dataset_sample_index, const Dense<int64_t> &sizes) {
    int64_t total = 0;
    for (ssize_t d = 0; d < sizes.size(); ++d) {
        if (sizes.data()[d] < 0) fail("fill_exhaustive_blend: sizes of 0 or more expected");
        total += sizes.data()[d];
    }
    if (dataset_index.size() > total || dataset_sample_index.size() != dataset_index.size())
        fail("fill_exhaustive_blend: two arrays of at most ", total, " entries expected");
    if (sizes.size() < 1 || sizes.size() > 32767) fail("a blend has 1 to 32767 datasets, found ", sizes.size());
    int16_t *datasets = dataset_index.mutable_data();
    int64_t *samples = dataset_sample_index.mutable_data();
    py::gil_scoped_release release;
    fill_exhaustive_blend(datasets, samples, sizes.data(), sizes.size(), dataset_index.size());
}

// Adds to `counts`, int64 (datasets,).
void count(const Dense<int16_t> &dataset_index, Dense<int64_t> &counts) {
    int64_t *out = counts.mutable_data();
    py::gil_scoped_release release;
    count_datasets(dataset_index.data(), dataset_index.size(), out, counts.size());
}

} // namespace

void bind_index_builders(py::module_ &module) {
    py::class_<LegacyShuffler>(module, "LegacyShuffler")
        .def(py::init<uint32_t>(), py::arg("seed"))
        .def("shuffle", [](LegacyShuffler &self, Dense<int64_t> &values) { self.shuffle(values.mutable_data(), values.size()); },
             py::arg("values").noconvert());
    module.def("fill_document_index", &document_index, py::arg("out").noconvert(), py::arg("first"), py::arg("last"),
               py::arg("epochs"), py::arg("separate_final_epoch"), py::arg("shuffler"));
    module.def("fill_sample_index", &sample_index<int32_t>, py::arg("out").noconvert(), py::arg("dataset"),
               py::arg("document_index").noconvert(), py::arg("seq_length"));
    module.def("fill_sample_index", &sample_index<int64_t>, py::arg("out").noconvert(), py::arg("dataset"),
               py::arg("document_index").noconvert(), py::arg("seq_length"));
    module.def("fill_shuffle_index", &shuffle_index<uint32_t>, py::arg("out").noconvert(), py::arg("boundary"), py::arg("shuffler"));
    module.def("fill_shuffle_index", &shuffle_index<int64_t>, py::arg("out").noconvert(), py::arg("boundary"), py::arg("shuffler"));
    module.def("fill_blend", &blend, py::arg("dataset_index").noconvert(), py::arg("dataset_sample_index").noconvert(), py::arg("weights"));
    module.def("fill_exhaustive_blend", &exhaustive_blend, py::arg("dataset_index").noconvert(),
               py::arg("dataset_sample_index").noconvert(), py::arg("sizes"));
    module.def("count_datasets", &count, py::arg("dataset_index").noconvert(), py::arg("counts").noconvert());
}
