// Python bindings of the indexed dataset: its reader and the samples cut out of it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <vector>

#include "content_hash.h"
#include "data_error.h"
#include "document_masks.h"
#include "indexed_dataset.h"
#include "sample_reader.h"

namespace py = pybind11;

namespace {

using Dataset = std::shared_ptr<IndexedDataset>;
template <typename T> using Dense = py::array_t<T, py::array::c_style>;

// A read-only view of mapped memory that keeps its dataset open.
py::array view(const Dataset &dataset, const std::string &dtype, int64_t count, const uint8_t *data) {
    static const uint8_t nothing = 0; // an empty file is mapped nowhere
    const py::capsule owner(new Dataset(dataset), [](void *pointer) { delete static_cast<Dataset *>(pointer); });
    py::array array(py::dtype(dtype), {count}, {}, data == nullptr ? &nothing : data, owner);
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return array;
}

// The elements from byte `offset` on, read-only; its `base` is the file. No descriptor stays open, unlike under numpy.memmap.
py::array mapped_array(const std::shared_ptr<MappedFile> &file, const py::dtype &dtype, const std::vector<ssize_t> &shape, uint64_t offset) {
    uint64_t bytes = static_cast<uint64_t>(dtype.itemsize());
    for (const ssize_t size : shape)
        if (size < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) fail(file->path(), ": no such shape");
    if (offset > file->size() || bytes > file->size() - offset)
        fail(file->path(), ": expected ", bytes, " bytes after the first ", offset, ", found a file of ", file->size(), " bytes");
    py::array array(dtype, shape, {}, file->data() + offset, py::cast(file));
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return array;
}

py::array sequence(const Dataset &dataset, int64_t index, int64_t offset, std::optional<int64_t> count) {
    if (index < 0 || index >= dataset->sequences())
        throw py::index_error(dataset->prefix() + ": sequence " + std::to_string(index) + " asked for, but it has " +
                              std::to_string(dataset->sequences()));
    const int64_t length = count.value_or(dataset->length(index) - offset);
    const uint8_t *data = dataset->find(index, offset, length);
    if (data == nullptr)
        fail(dataset->prefix(), ": sequence ", index, ": tokens ", offset, " to ", offset + length,
             " asked for, but it has ", dataset->length(index));
    return view(dataset, dataset->type().name, length, data);
}

// Keeps alive, beside the reader, the arrays that it points into; `files`: those that they are mapped from.
struct ArraySampleReader : SampleReader {
    py::array documents, rows, order;
    std::vector<std::shared_ptr<MappedFile>> files;

    void check_files() const {
        dataset->check_size();
        for (const auto &file : files) file->check_size();
    }
    void check_read() const {
        dataset->check_read();
        for (const auto &file : files) file->check_read();
    }
    // Runs `read`, and throws when what it read is not there; that goes before an error which came of it.
    template <typename Read> void checked(const Read &read) const {
        try {
            read();
        } catch (const DataError &) {
            check_read();
            throw;
        }
        check_read();
    }
};

std::unique_ptr<ArraySampleReader> make_sample_reader(const Dataset &dataset, const Dense<int32_t> &document_index,
                                                      const py::array &sample_index, const py::array &shuffle_index,
                                                      int64_t seq_length, const std::vector<std::shared_ptr<MappedFile>> &files) {
    auto reader = std::make_unique<ArraySampleReader>();
    reader->files = files;
    reader->documents = document_index;
    reader->wide_samples = sample_index.dtype().itemsize() == 8;
    reader->wide_shuffle = shuffle_index.dtype().itemsize() == 8;
    if (reader->wide_samples) reader->rows = Dense<int64_t>(sample_index);
    else reader->rows = Dense<int32_t>(sample_index);
    if (reader->wide_shuffle) reader->order = Dense<int64_t>(shuffle_index);
    else reader->order = Dense<uint32_t>(shuffle_index);
    if (sample_index.ndim() != 2 || sample_index.shape(1) != 2 || sample_index.shape(0) != shuffle_index.size() + 1)
        fail("sample_index: expected shape (", shuffle_index.size() + 1, ", 2), one row more than shuffle_index");
    if (seq_length < 1) fail("seq_length: expected 1 or more, found ", seq_length);
    reader->dataset = dataset;
    reader->document_index = static_cast<const int32_t *>(reader->documents.data());
    reader->document_count = document_index.size();
    reader->sample_index = reader->rows.data();
    reader->shuffle_index = reader->order.data();
    reader->samples = shuffle_index.size();
    reader->seq_length = seq_length;
    return reader;
}

// Row i of `out` (n, seq_length + 1) becomes sample `samples[i]` of `readers[datasets[i]]`.
void read_samples(const std::vector<const ArraySampleReader *> &readers, const Dense<int64_t> &datasets,
                  const Dense<int64_t> &samples, Dense<int64_t> &out) {
    const int64_t rows = samples.size();
    if (datasets.size() != rows) fail("read_samples: ", datasets.size(), " datasets for ", rows, " samples");
    if (out.ndim() != 2 || out.shape(0) != rows) fail("read_samples: expected an array with ", rows, " rows");
    const int64_t width = out.shape(1);
    for (const ArraySampleReader *reader : readers)
        if (reader->seq_length + 1 != width)
            fail("read_samples: expected rows of ", reader->seq_length + 1, " tokens, found ", width);
    const int64_t *dataset = datasets.data(), *sample = samples.data();
    int64_t *target = out.mutable_data();
    py::gil_scoped_release release;
    std::vector<bool> checked(readers.size(), false);
    for (int64_t i = 0; i < rows; ++i) {
        if (dataset[i] < 0 || dataset[i] >= static_cast<int64_t>(readers.size()))
            fail("read_samples: dataset ", dataset[i], " of ", readers.size());
        const ArraySampleReader &reader = *readers[static_cast<size_t>(dataset[i])];
        if (!checked[static_cast<size_t>(dataset[i])]) {
            reader.check_files();
            checked[static_cast<size_t>(dataset[i])] = true;
        }
        reader.checked([&] { reader.read(sample[i], target + i * width); });
    }
}

// Fills `positions` int64 and `mask` float32, both (n, seq_length) where given; returns the boundaries of the documents.
Dense<int32_t> masked(const Dense<int64_t> &tokens, int64_t seq_length, int64_t eod, std::optional<Dense<int64_t>> positions,
                      std::optional<Dense<float>> mask) {
    if (tokens.ndim() != 2 || seq_length < 1 || seq_length > tokens.shape(1))
        fail("mask_documents: expected tokens (n, seq_length + 1)");
    const int64_t rows = tokens.shape(0), size = rows * seq_length;
    if ((positions && positions->size() != size) || (mask && mask->size() != size))
        fail("mask_documents: expected positions and mask of ", size, " elements");
    int64_t *position = positions ? positions->mutable_data() : nullptr;
    float *weight = mask ? mask->mutable_data() : nullptr;
    std::vector<int32_t> starts;
    {
        py::gil_scoped_release release;
        starts = mask_documents(tokens.data(), rows, tokens.shape(1), seq_length, eod, position, weight);
    }
    return Dense<int32_t>(static_cast<ssize_t>(starts.size()), starts.data());
}

} // namespace

void bind_indexed_dataset(py::module_ &module) {
    const auto &data_error = py::register_exception<DataError>(module, "DataError", PyExc_ValueError);
    py::register_exception<WriteError>(module, "WriteError", data_error);
    py::register_exception<ShortageError>(module, "ShortageError", data_error);

    py::class_<IndexedDataset, Dataset>(module, "IndexedDataset")
        .def(py::init<const std::string &>(), py::arg("prefix"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("prefix", &IndexedDataset::prefix)
        .def_property_readonly("dtype", [](const IndexedDataset &self) { return self.type().name; })
        .def_property_readonly("sequences", &IndexedDataset::sequences)
        .def_property_readonly("documents", &IndexedDataset::documents)
        .def_property_readonly("tokens", &IndexedDataset::tokens)
        .def_property_readonly("lengths", [](const Dataset &self) { return view(self, "int32", self->sequences(), self->lengths()); })
        .def_property_readonly("offsets", [](const Dataset &self) { return view(self, "int64", self->sequences(), self->offsets()); })
        .def_property_readonly("boundaries",
                               [](const Dataset &self) { return view(self, "int64", self->documents() + 1, self->boundaries()); })
        .def("stream", [](const Dataset &self) { return view(self, self->type().name, self->tokens(), self->bin()->data()); })
        .def("sequence", &sequence, py::arg("index"), py::arg("offset") = 0, py::arg("count") = std::nullopt)
        .def("check_read", &IndexedDataset::check_read)
        .def("check_size", &IndexedDataset::check_size)
        .def("tokens_between", &IndexedDataset::tokens_between, py::arg("first"), py::arg("last"))
        .def("lengths_hash", &IndexedDataset::lengths_hash, py::arg("first"), py::arg("last"),
             py::call_guard<py::gil_scoped_release>());

    module.def("handle_bus_errors", &handle_bus_errors);

    py::class_<MappedFile, std::shared_ptr<MappedFile>>(module, "MappedFile")
        .def(py::init<const std::string &>(), py::arg("path"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly_static("SMALL", [](const py::object &) { return MappedFile::kSmall; })
        .def("check_read", &MappedFile::check_read)
        .def("check_size", &MappedFile::check_size)
        .def("array", &mapped_array, py::arg("dtype"), py::arg("shape"), py::arg("offset"));

    py::class_<ArraySampleReader>(module, "SampleReader")
        .def(py::init(&make_sample_reader), py::arg("dataset"), py::arg("document_index"), py::arg("sample_index"),
             py::arg("shuffle_index"), py::arg("seq_length"), py::arg("files") = std::vector<std::shared_ptr<MappedFile>>())
        .def("pieces", [](const ArraySampleReader &self, int64_t sample) {
            std::vector<std::tuple<int64_t, int64_t, int64_t>> out;
            self.checked([&] {
                for (const Piece &piece : self.pieces(sample)) out.emplace_back(piece.sequence, piece.offset, piece.count);
            });
            return out;
        });

    module.def("content_hash", [](const py::array &array) {
        if (!(array.flags() & py::array::c_style)) fail("content_hash: expected a contiguous array");
        const uint8_t *data = static_cast<const uint8_t *>(array.data());
        const uint64_t bytes = static_cast<uint64_t>(array.nbytes());
        py::gil_scoped_release release;
        return content_hash(data, bytes);
    }, py::arg("array"));
    module.def("read_samples", &read_samples, py::arg("readers"), py::arg("datasets"), py::arg("samples"),
               py::arg("out").noconvert());

    module.def("mask_documents", &masked, py::arg("tokens"), py::arg("seq_length"), py::arg("eod"),
               py::arg("positions").noconvert() = std::nullopt, py::arg("mask").noconvert() = std::nullopt);
}
