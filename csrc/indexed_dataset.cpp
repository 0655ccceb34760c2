// Reader of Megatron's indexed dataset; see indexed_dataset.h for the format.
#include "indexed_dataset.h"

#include <algorithm>

#include "content_hash.h"
#include "data_error.h"
#include "threads.h"

namespace {

constexpr TokenType kTypes[] = {
    {1, 1, "uint8", true},  {2, 1, "int8", true},     {3, 2, "int16", true},    {4, 4, "int32", true},
    {5, 8, "int64", true},  {6, 8, "float64", false}, {7, 4, "float32", false}, {8, 2, "uint16", true},
};

constexpr int64_t kBlock = 1 << 20; // sequences a thread checks at a time

} // namespace

const TokenType *token_type(int code) {
    for (const TokenType &type : kTypes)
        if (type.code == code) return &type;
    return nullptr;
}

const TokenType &token_type(const std::string &name) {
    for (const TokenType &type : kTypes)
        if (type.name == name) return type;
    fail("dtype ", name, ": the format has uint8, int8, int16, int32, int64, uint16, float32 and float64");
}

IndexedDataset::IndexedDataset(const std::string &prefix) : prefix_(prefix) {
    idx_ = std::make_shared<MappedFile>(prefix + ".idx");
    bin_ = std::make_shared<MappedFile>(prefix + ".bin");
    if (!idx_->has_name()) // a writer takes it away before it replaces the .bin, which may be one of another .idx
        fail(prefix, ": was replaced while it was opened; give the same command again");
    try {
        check_header();
        check_arrays();
    } catch (const DataError &) {
        idx_->check_read(); // says more: what was found wrong are the zeros in the place of what is gone
        throw;
    }
    idx_->check_read();
}

void IndexedDataset::check_header() {
    const std::string &path = idx_->path();
    const uint64_t size = idx_->size();
    if (size < kHeaderBytes)
        fail(path, ": expected at least ", kHeaderBytes, " bytes of header, found a file of ", size, " bytes");
    const uint8_t *data = idx_->data();
    if (std::memcmp(data, kMagic, sizeof(kMagic)) != 0)
        fail(path, ": expected a file that starts with MMIDIDX, found other bytes; it is not an index of this format");
    const uint64_t version = load<uint64_t>(data + 9);
    if (version != kVersion) fail(path, ": expected version ", kVersion, ", found ", version);
    type_ = token_type(static_cast<int>(data[17]));
    if (type_ == nullptr) fail(path, ": expected a dtype code from 1 to 8, found ", static_cast<int>(data[17]));

    const uint64_t sequences = load<uint64_t>(data + 18), boundaries = load<uint64_t>(data + 26);
    const uint64_t room = size - kHeaderBytes;
    if (sequences > room / 12 || boundaries > room / 8)
        fail(path, ": the header promises ", sequences, " sequences and ", boundaries,
             " document boundaries, more than a file of ", size, " bytes can hold");
    if (boundaries == 0) fail(path, ": expected at least 1 document boundary, found 0");
    const uint64_t expected = 12 * sequences + 8 * boundaries;
    if (sequences > 0 && room == expected + sequences)
        fail(path, ": holds a mode for each of its ", sequences, " sequences, as multimodal datasets do; only text is read here");
    if (room != expected)
        fail(path, ": expected ", kHeaderBytes + expected, " bytes for ", sequences, " sequences and ", boundaries,
             " document boundaries, found ", size, " bytes");
    sequences_ = static_cast<int64_t>(sequences);
    documents_ = static_cast<int64_t>(boundaries) - 1;
    lengths_ = data + kHeaderBytes;
    offsets_ = lengths_ + 4 * sequences;
    boundaries_ = offsets_ + 8 * sequences;
}

std::string IndexedDataset::describe_bad_entry(int64_t i) const {
    std::ostringstream text;
    const int64_t length = this->length(i), offset = load<int64_t>(offsets_ + 8 * i);
    text << idx_->path() << ": sequence " << i << ": ";
    if (length < 0) {
        text << "expected a length of 0 or more, found " << length;
    } else if (i == 0) {
        text << "expected byte offset 0, found " << offset;
    } else {
        const int64_t before = load<int64_t>(offsets_ + 8 * (i - 1));
        text << "expected the byte offset " << before << " + " << this->length(i - 1) << " * " << type_->bytes
             << " where its predecessor ends, found " << offset;
    }
    return text.str();
}

void IndexedDataset::check_arrays() const {
    const uint64_t unit = type_->bytes;
    const auto offset = [this](int64_t i) { return load<uint64_t>(offsets_ + 8 * i); };
    // Where sequence i must start; unsigned, so that nonsense values wrap instead of overflowing.
    const auto expected = [&](int64_t i) {
        return i == 0 ? 0 : offset(i - 1) + static_cast<uint64_t>(length(i - 1)) * unit;
    };
    const int64_t bad = least_of((sequences_ + kBlock - 1) / kBlock, sequences_, [&](int64_t block) {
        const int64_t first = block * kBlock, last = std::min(sequences_, first + kBlock);
        uint64_t start = expected(first);
        bool good = true;
        for (int64_t i = first; i < last; ++i) { // no exit inside: the good case is the one to be fast
            good &= length(i) >= 0 && offset(i) == start;
            start = offset(i) + static_cast<uint64_t>(length(i)) * unit;
        }
        for (int64_t i = first; !good && i < last; ++i)
            if (length(i) < 0 || offset(i) != expected(i)) return i;
        return sequences_;
    });
    if (bad < sequences_) throw DataError(describe_bad_entry(bad));
    const uint64_t end = sequences_ == 0 ? 0 : offset(sequences_ - 1) + static_cast<uint64_t>(length(sequences_ - 1)) * unit;
    if (end != bin_->size())
        fail(bin_->path(), ": expected ", end, " bytes (", end / unit, " tokens of ", type_->name, " in the ", sequences_,
             " sequences of the .idx), found ", bin_->size(), " bytes");

    const int64_t bad_boundary = least_of(documents_ / kBlock + 1, documents_ + 1, [&](int64_t block) {
        const int64_t first = block * kBlock, last = std::min(documents_ + 1, first + kBlock);
        int64_t previous = first == 0 ? 0 : load<int64_t>(boundaries_ + 8 * (first - 1));
        for (int64_t i = first; i < last; ++i) {
            const int64_t boundary = load<int64_t>(boundaries_ + 8 * i);
            if (boundary < previous || boundary > sequences_ || (i == 0 && boundary != 0)) return i;
            previous = boundary;
        }
        return documents_ + 1;
    });
    if (bad_boundary <= documents_)
        fail(idx_->path(), ": document boundary ", bad_boundary, ": expected ",
             bad_boundary == 0 ? "0" : "a number from its predecessor to the number of sequences", " (",
             bad_boundary == 0 ? 0 : load<int64_t>(boundaries_ + 8 * (bad_boundary - 1)), " to ", sequences_, "), found ",
             load<int64_t>(boundaries_ + 8 * bad_boundary));
    const int64_t final_boundary = load<int64_t>(boundaries_ + 8 * documents_);
    if (final_boundary != sequences_)
        fail(idx_->path(), ": expected the last document to end at sequence ", sequences_, ", found ", final_boundary);
}

const uint8_t *IndexedDataset::find(int64_t sequence, int64_t offset, int64_t count) const {
    if (sequence < 0 || sequence >= sequences_ || offset < 0 || count < 0) return nullptr;
    const int64_t size = length(sequence);
    if (offset > size || count > size - offset) return nullptr;
    // Checked again although the constructor did: the file may have been overwritten since.
    const uint64_t start = load<uint64_t>(offsets_ + 8 * sequence), unit = type_->bytes;
    const uint64_t reach = (static_cast<uint64_t>(offset) + static_cast<uint64_t>(count)) * unit; // below 2^35
    if (start > bin_->size() || reach > bin_->size() - start) return nullptr;
    return bin_->data() + start + static_cast<uint64_t>(offset) * unit;
}

void IndexedDataset::check_read() const {
    idx_->check_read();
    bin_->check_read();
}

void IndexedDataset::check_size() const {
    idx_->check_size();
    bin_->check_size();
}

void IndexedDataset::check_range(int64_t first, int64_t last) const {
    if (first < 0 || first > last || last > sequences_)
        fail(prefix_, ": sequences [", first, ", ", last, ") asked for, but it has ", sequences_);
}

int64_t IndexedDataset::tokens_between(int64_t first, int64_t last) const {
    check_range(first, last);
    if (first == last) return 0;
    const int64_t bytes = load<int64_t>(offsets_ + 8 * (last - 1)) - load<int64_t>(offsets_ + 8 * first);
    const int64_t tokens = bytes / static_cast<int64_t>(type_->bytes) + length(last - 1);
    idx_->check_read();
    return tokens;
}

uint64_t IndexedDataset::lengths_hash(int64_t first, int64_t last) const {
    check_range(first, last);
    const uint64_t hash = content_hash(lengths_ + 4 * first, 4 * static_cast<uint64_t>(last - first));
    idx_->check_read();
    return hash;
}
