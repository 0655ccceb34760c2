// Python bindings of the indexed dataset: its reader, its writer, and the samples cut out of it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "content_hash.h"
#include "data_error.h"
#include "document_masks.h"
#include "indexed_dataset.h"
#include "indexed_writer.h"
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

template <typename From, typename To> void write_tokens(IndexedWriter &writer, const From *tokens, uint64_t count) {
    constexpr uint64_t kChunk = OutputFile::kCapacity / sizeof(To);
    for (uint64_t first = 0; first < count; first += kChunk) {
        const uint64_t part = std::min(kChunk, count - first);
        To *out = reinterpret_cast<To *>(writer.reserve_tokens(part));
        for (uint64_t i = 0; i < part; ++i) out[i] = static_cast<To>(tokens[first + i]);
        writer.commit_tokens(part);
    }
}

template <typename From, typename To> void check_and_write(IndexedWriter &writer, const From *tokens, uint64_t count) {
    From least = 0, most = 0;
    for (uint64_t i = 0; i < count; ++i) {
        least = std::min(least, tokens[i]);
        most = std::max(most, tokens[i]);
    }
    const int64_t low = static_cast<int64_t>(least), high = static_cast<int64_t>(most);
    const int64_t limit = static_cast<int64_t>(std::numeric_limits<To>::max());
    if (low < 0 || high > limit)
        fail("token id ", low < 0 ? low : high, " does not fit ", writer.type().name, ", which holds 0 to ", limit);
    write_tokens<From, To>(writer, tokens, count);
}

template <typename From> void add_tokens_as(IndexedWriter &writer, const Dense<From> &tokens) {
    const uint64_t count = static_cast<uint64_t>(tokens.size());
    const From *data = tokens.data();
    py::gil_scoped_release release;
    switch (writer.type().code) {
    case 1: return check_and_write<From, uint8_t>(writer, data, count);
    case 2: return check_and_write<From, int8_t>(writer, data, count);
    case 3: return check_and_write<From, int16_t>(writer, data, count);
    case 4: return check_and_write<From, int32_t>(writer, data, count);
    case 5: return check_and_write<From, int64_t>(writer, data, count);
    case 8: return check_and_write<From, uint16_t>(writer, data, count);
    default: fail("dtype ", writer.type().name, " does not hold token ids");
    }
}

void add_tokens(IndexedWriter &writer, const py::array &tokens) {
    if (py::isinstance<py::array_t<uint16_t>>(tokens)) return add_tokens_as<uint16_t>(writer, Dense<uint16_t>(tokens));
    if (py::isinstance<py::array_t<uint32_t>>(tokens)) return add_tokens_as<uint32_t>(writer, Dense<uint32_t>(tokens));
    if (py::isinstance<py::array_t<int32_t>>(tokens)) return add_tokens_as<int32_t>(writer, Dense<int32_t>(tokens));
    if (py::isinstance<py::array_t<uint8_t>>(tokens)) return add_tokens_as<uint8_t>(writer, Dense<uint8_t>(tokens));
    if (py::isinstance<py::array_t<int64_t>>(tokens)) return add_tokens_as<int64_t>(writer, Dense<int64_t>(tokens));
    fail("tokens: expected an array of uint8, uint16, int32, uint32 or int64, found ",
         py::str(tokens.dtype()).cast<std::string>());
}

// The sum of `values`, none of which may be negative.
template <typename T> int64_t checked_sum(const Dense<T> &values, const char *what) {
    int64_t sum = 0;
    for (ssize_t i = 0; i < values.size(); ++i) {
        if (values.data()[i] < 0) fail(what, ": expected 0 or more, found ", values.data()[i]);
        sum += static_cast<int64_t>(values.data()[i]);
    }
    return sum;
}

void add_sequences(IndexedWriter &writer, const Dense<int32_t> &lengths) {
    checked_sum(lengths, "length of a sequence");
    writer.add_sequences(lengths.data(), static_cast<uint64_t>(lengths.size()));
}

void add_documents(IndexedWriter &writer, const Dense<int64_t> &sequences) {
    checked_sum(sequences, "sequences of a document");
    writer.add_documents(sequences.data(), static_cast<uint64_t>(sequences.size()));
}

void add(IndexedWriter &writer, const py::array &tokens, const Dense<int32_t> &lengths, const Dense<int64_t> &documents) {
    const int64_t in_lengths = checked_sum(lengths, "length of a sequence");
    const int64_t in_documents = checked_sum(documents, "sequences of a document");
    if (in_lengths != tokens.size()) fail("the lengths sum to ", in_lengths, " tokens, but ", tokens.size(), " were given");
    if (in_documents != lengths.size())
        fail("the documents hold ", in_documents, " sequences, but ", lengths.size(), " lengths were given");
    add_tokens(writer, tokens);
    writer.add_sequences(lengths.data(), static_cast<uint64_t>(lengths.size()));
    writer.add_documents(documents.data(), static_cast<uint64_t>(documents.size()));
}

// The elements of `values`, which the array takes over.
Dense<int32_t> as_array(std::vector<int32_t> &&values) {
    auto *const owned = new std::vector<int32_t>(std::move(values));
    const py::capsule owner(owned, [](void *pointer) { delete static_cast<std::vector<int32_t> *>(pointer); });
    return Dense<int32_t>(static_cast<ssize_t>(owned->size()), owned->data(), owner);
}

// Lists of Python ints end to end: tokens int32 (sum of lengths,), lengths int32 (lists,).
py::tuple flatten_ids(const py::iterable &lists) {
    std::vector<int32_t> tokens, lengths;
    for (const py::handle item : lists) {
        if (!PyList_Check(item.ptr())) fail("flatten_ids: expected lists of ids");
        const ssize_t count = PyList_GET_SIZE(item.ptr());
        if (count > std::numeric_limits<int32_t>::max()) fail("a sequence of ", count, " tokens: at most 2147483647 fit the format");
        lengths.push_back(static_cast<int32_t>(count));
        for (ssize_t i = 0; i < count; ++i) {
            const long id = PyLong_AsLong(PyList_GET_ITEM(item.ptr(), i));
            if (id == -1 && PyErr_Occurred()) throw py::error_already_set();
            if (id < 0 || id > std::numeric_limits<int32_t>::max()) fail("token id ", id, ": expected 0 to 2147483647");
            tokens.push_back(static_cast<int32_t>(id));
        }
    }
    return py::make_tuple(as_array(std::move(tokens)), as_array(std::move(lengths)));
}

// `tokens` with `token` put in before each of the places `before`, which ascend.
Dense<int32_t> insert_token(const Dense<int32_t> &tokens, const Dense<int64_t> &before, int32_t token) {
    const int64_t count = tokens.size(), insertions = before.size();
    Dense<int32_t> out(count + insertions);
    const int32_t *source = tokens.data();
    const int64_t *places = before.data();
    int32_t *target = out.mutable_data();
    py::gil_scoped_release release;
    int64_t done = 0;
    for (int64_t i = 0; i < insertions; ++i) {
        if (places[i] < done || places[i] > count) fail("insert_token: place ", places[i], " after ", done, " of ", count, " tokens");
        target = std::copy(source + done, source + places[i], target);
        *target++ = token;
        done = places[i];
    }
    std::copy(source + done, source + count, target);
    return out;
}

using State = std::tuple<int64_t, int64_t, int64_t, uint32_t>;

std::unique_ptr<IndexedWriter> make_writer(const std::string &prefix, const std::string &dtype, const std::optional<State> &resume) {
    if (!resume) return std::make_unique<IndexedWriter>(prefix, dtype, nullptr);
    WriterState state;
    std::tie(state.tokens, state.sequences, state.documents, state.checksum) = *resume;
    return std::make_unique<IndexedWriter>(prefix, dtype, &state);
}

// Keeps alive, beside the reader, the arrays that it points into; `files`: those that they are mapped from.
struct ArraySampleReader : SampleReader {
    py::array documents, rows, order;
    std::vector<std::shared_ptr<MappedFile>> files;

    void check_files() const {
        dataset->bin()->check_size();
        dataset->idx()->check_size();
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
        .def("tokens_between", &IndexedDataset::tokens_between, py::arg("first"), py::arg("last"))
        .def("lengths_hash", &IndexedDataset::lengths_hash, py::arg("first"), py::arg("last"));

    py::class_<IndexedWriter>(module, "IndexedWriter")
        .def(py::init(&make_writer), py::arg("prefix"), py::arg("dtype"), py::arg("resume") = std::nullopt)
        .def("add_tokens", &add_tokens, py::arg("tokens"))
        .def("add_sequences", &add_sequences, py::arg("lengths"))
        .def("add_documents", &add_documents, py::arg("sequences"))
        .def("add", &add, py::arg("tokens"), py::arg("lengths"), py::arg("documents"))
        .def_property_readonly("state",
                               [](const IndexedWriter &self) {
                                   const WriterState &state = self.state();
                                   return State(state.tokens, state.sequences, state.documents, state.checksum);
                               })
        .def("flush", &IndexedWriter::flush, py::arg("sync"), py::call_guard<py::gil_scoped_release>())
        .def("complete", &IndexedWriter::complete, py::arg("sync"), py::call_guard<py::gil_scoped_release>())
        .def("publish", &IndexedWriter::publish, py::call_guard<py::gil_scoped_release>());

    py::class_<MappedFile, std::shared_ptr<MappedFile>>(module, "MappedFile")
        .def(py::init<const std::string &>(), py::arg("path"))
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

    module.def("insert_token", &insert_token, py::arg("tokens"), py::arg("before"), py::arg("token"));
    module.def("content_hash", [](const py::array &array) {
        if (!(array.flags() & py::array::c_style)) fail("content_hash: expected a contiguous array");
        const uint8_t *data = static_cast<const uint8_t *>(array.data());
        const uint64_t bytes = static_cast<uint64_t>(array.nbytes());
        py::gil_scoped_release release;
        return content_hash(data, bytes);
    }, py::arg("array"));
    module.def("flatten_ids", &flatten_ids, py::arg("lists"));
    module.def("read_samples", &read_samples, py::arg("readers"), py::arg("datasets"), py::arg("samples"),
               py::arg("out").noconvert());

    module.def("mask_documents", &masked, py::arg("tokens"), py::arg("seq_length"), py::arg("eod"),
               py::arg("positions").noconvert() = std::nullopt, py::arg("mask").noconvert() = std::nullopt);
}
