// Megatron's indexed dataset: PREFIX.bin holds the tokens, PREFIX.idx where each sequence lies in it.
//
// .idx, little-endian and packed: "MMIDIDX\0\0", uint64 version 1, uint8 dtype code, uint64 S sequences, uint64 D = documents + 1,
// int32 lengths[S], int64 byte offsets[S] (exclusive prefix sum), int64 document boundaries[D] (0, ..., S).
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "mapped_file.h"

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr uint64_t kVersion = 1;
constexpr uint64_t kHeaderBytes = 34;

struct TokenType {
    int code;
    uint64_t bytes;
    const char *name; // NumPy's
    bool integer;
};

// The type with this code of the header, or nullptr.
const TokenType *token_type(int code);
// The type with this NumPy name; throws for one that the format has no code for.
const TokenType &token_type(const std::string &name);

template <typename T> T load(const uint8_t *address) { // the arrays of an .idx are not aligned
    T value;
    std::memcpy(&value, address, sizeof(T));
    return value;
}

// Opened only if the two files agree in everything that reading relies on.
class IndexedDataset {
  public:
    explicit IndexedDataset(const std::string &prefix);

    const std::string &prefix() const { return prefix_; }
    const TokenType &type() const { return *type_; }
    int64_t sequences() const { return sequences_; }
    int64_t documents() const { return documents_; }
    int64_t tokens() const { return static_cast<int64_t>(bin_->size() / type_->bytes); }
    int64_t length(int64_t sequence) const { return load<int32_t>(lengths_ + 4 * sequence); }
    // Sequence `sequence` from token `offset` on; nullptr when [offset, offset + count) is not inside it and the file.
    const uint8_t *find(int64_t sequence, int64_t offset, int64_t count) const;

    const uint8_t *lengths() const { return lengths_; }
    const uint8_t *offsets() const { return offsets_; }
    const uint8_t *boundaries() const { return boundaries_; }
    const std::shared_ptr<MappedFile> &idx() const { return idx_; }
    const std::shared_ptr<MappedFile> &bin() const { return bin_; }

    // Throws when something read of the two files since they were opened was not there.
    void check_read() const;
    // As that of the two files, before they are read.
    void check_size() const;
    // Sum of the lengths of sequences [first, last). Throws for a range that there is not, as `lengths_hash` does.
    int64_t tokens_between(int64_t first, int64_t last) const;
    // 64-bit hash of the lengths of sequences [first, last): what an index of samples depends on.
    uint64_t lengths_hash(int64_t first, int64_t last) const;

  private:
    void check_header();
    void check_arrays() const;
    void check_range(int64_t first, int64_t last) const;
    std::string describe_bad_entry(int64_t sequence) const;

    std::string prefix_;
    std::shared_ptr<MappedFile> idx_, bin_;
    const TokenType *type_ = nullptr;
    int64_t sequences_ = 0, documents_ = 0;
    const uint8_t *lengths_ = nullptr, *offsets_ = nullptr, *boundaries_ = nullptr;
};
