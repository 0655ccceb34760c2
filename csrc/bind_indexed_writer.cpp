// Python bindings of the indexed dataset's writer, and of what makes token ids ready for it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "data_error.h"
#include "indexed_writer.h"

namespace py = pybind11;

namespace {

template <typename T> using Dense = py::array_t<T, py::array::c_style>;

// Names the first of `ids` that To does not hold; there is one.
template <typename To, typename From> [[noreturn]] void refuse(const From *ids, const TokenType &type) {
    constexpr int64_t limit = std::numeric_limits<To>::max();
    while (static_cast<int64_t>(*ids) >= 0 && static_cast<int64_t>(*ids) <= limit) ++ids;
    fail("token id ", static_cast<int64_t>(*ids), " does not fit ", type.name, ", which holds 0 to ", limit);
}

// An id has other bits than the largest that a To holds, all of whose bits are 1, exactly when To does not hold it.
template <typename To, typename From> bool holds(From bits) {
    return (static_cast<uint64_t>(static_cast<int64_t>(bits)) & ~static_cast<uint64_t>(std::numeric_limits<To>::max())) == 0;
}

template <typename To, typename From> void check_ids(const From *ids, uint64_t count, const TokenType &type) {
    if constexpr (std::is_unsigned_v<To> && std::is_same_v<To, From>) return;
    From bits = 0;
    for (uint64_t i = 0; i < count; ++i) bits |= ids[i];
    if (!holds<To>(bits)) refuse<To>(ids, type);
}

template <typename To, typename From> void write_ids(IndexedWriter &writer, const From *ids, uint64_t count) {
    check_ids<To>(ids, count, writer.type());
    if constexpr (std::is_same_v<To, From>) return writer.add_tokens(ids, count);
    constexpr uint64_t kChunk = OutputFile::kCapacity / sizeof(To);
    for (uint64_t first = 0; first < count; first += kChunk) {
        const uint64_t part = std::min(kChunk, count - first);
        std::copy(ids + first, ids + first + part, reinterpret_cast<To *>(writer.reserve_tokens(part)));
        writer.commit_tokens(part);
    }
}

// Calls `use` with a value of the type that holds the ids of `type`.
template <typename Use> auto with_type(const TokenType &type, const Use &use) {
    switch (type.code) {
    case 1: return use(uint8_t());
    case 2: return use(int8_t());
    case 3: return use(int16_t());
    case 4: return use(int32_t());
    case 5: return use(int64_t());
    case 8: return use(uint16_t());
    default: fail("dtype ", type.name, " does not hold token ids");
    }
}

template <typename From> void add_tokens_as(IndexedWriter &writer, const Dense<From> &tokens) {
    const uint64_t count = static_cast<uint64_t>(tokens.size());
    const From *data = tokens.data();
    py::gil_scoped_release release;
    with_type(writer.type(), [&](auto held) { write_ids<decltype(held)>(writer, data, count); });
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

// Copies `ids` to `out`; returns all their bits.
template <typename To> int32_t copy_ids(const int32_t *ids, int64_t count, To *out) {
    int32_t bits = 0;
    for (int64_t i = 0; i < count; ++i) {
        bits |= ids[i];
        out[i] = static_cast<To>(ids[i]);
    }
    return bits;
}

template <typename To>
py::array packed(const Dense<int32_t> &tokens, const Dense<int64_t> &before, int32_t token, const TokenType &type) {
    const int64_t count = tokens.size(), insertions = before.size();
    Dense<To> out(count + insertions);
    const int32_t *source = tokens.data();
    const int64_t *places = before.data();
    To *target = out.mutable_data();
    {
        py::gil_scoped_release release;
        int32_t bits = insertions == 0 ? 0 : token;
        int64_t done = 0;
        for (int64_t i = 0; i < insertions; ++i) {
            if (places[i] < done || places[i] > count) fail("pack_tokens: place ", places[i], " after ", done, " of ", count, " tokens");
            bits |= copy_ids(source + done, places[i] - done, target);
            target += places[i] - done;
            *target++ = static_cast<To>(token);
            done = places[i];
        }
        bits |= copy_ids(source + done, count - done, target);
        if (!holds<To>(bits)) refuse<To>(holds<To>(token) ? source : &token, type);
    }
    return out;
}

py::array pack_tokens(const Dense<int32_t> &tokens, const Dense<int64_t> &before, int32_t token, const std::string &dtype) {
    const TokenType &type = token_type(dtype);
    return with_type(type, [&](auto held) { return packed<decltype(held)>(tokens, before, token, type); });
}

using State = std::tuple<int64_t, int64_t, int64_t, uint32_t>;

std::unique_ptr<IndexedWriter> make_writer(const std::string &prefix, const std::string &dtype, const std::optional<State> &resume) {
    if (!resume) return std::make_unique<IndexedWriter>(prefix, dtype, nullptr);
    WriterState state;
    std::tie(state.tokens, state.sequences, state.documents, state.checksum) = *resume;
    return std::make_unique<IndexedWriter>(prefix, dtype, &state);
}

} // namespace

void bind_indexed_writer(py::module_ &module) {
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
        .def("publish", &IndexedWriter::publish, py::arg("described"), py::call_guard<py::gil_scoped_release>());

    module.def("flatten_ids", &flatten_ids, py::arg("lists"));
    module.def("pack_tokens", &pack_tokens, py::arg("tokens"), py::arg("before"), py::arg("token"), py::arg("dtype"),
               "`tokens` as `dtype`, with `token` put in before each of the places `before`, which ascend.");
}
