// Streaming writer of Megatron's indexed dataset. Memory is bounded by its buffers whatever the corpus; the files carry their
// final names only once they are complete.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "data_error.h"
#include "indexed_dataset.h"

// A file written from front to back through one buffer.
class OutputFile {
  public:
    // Creates `path`, or with keep >= 0 opens it and cuts it to that many bytes. Throws when another process has it open.
    OutputFile(const std::string &path, int64_t keep);
    // From now on checksum() is kept; `so_far` is that of what the file holds.
    void keep_checksum(uint32_t so_far) {
        checksummed_ = true;
        checksum_ = so_far;
    }
    ~OutputFile();
    OutputFile(const OutputFile &) = delete;
    OutputFile &operator=(const OutputFile &) = delete;

    uint8_t *reserve(uint64_t bytes); // room for at most kCapacity bytes, to be filled before `commit`
    void commit(uint64_t bytes) { used_ += bytes; }
    void write(const void *data, uint64_t bytes);
    void flush(bool sync);
    uint32_t checksum() const { return checksum_; } // CRC-32 of what was flushed, without write_at
    void write_at(uint64_t position, const void *data, uint64_t bytes); // after a flush
    void read_at(uint64_t position, void *data, uint64_t bytes) const;  // of what was flushed
    void check_name() const; // throws when its name is no longer this file's
    bool is_replaced() const; // as check_name(), but false where the file system cannot tell
    void close();
    const std::string &path() const { return path_; }

    static constexpr uint64_t kCapacity = 1 << 20;

  private:
    bool has_its_name() const; // where not, errno says why, 0 that another file has it
    void write_out(const uint8_t *data, uint64_t bytes);

    std::string path_;
    int descriptor_ = -1;
    std::vector<uint8_t> buffer_;
    uint64_t used_ = 0;
    bool checksummed_ = false;
    uint32_t checksum_ = 0;
};

struct WriterState { // what has been written so far
    int64_t tokens = 0, sequences = 0, documents = 0;
    uint32_t checksum = 0; // CRC-32 of the tokens' bytes, as of the last flush
};

class IndexedWriter {
  public:
    // `resume`: continue the partial files after this much of them, as an earlier flush() reported it; nullptr starts anew.
    IndexedWriter(const std::string &prefix, const std::string &dtype, const WriterState *resume);

    const TokenType &type() const { return type_; }
    const WriterState &state() const { return state_; }

    // Appends tokens in this type's own representation. Nothing can be appended behind complete().
    void add_tokens(const void *tokens, uint64_t count);
    uint8_t *reserve_tokens(uint64_t count) {
        check_open();
        return bin_.reserve(count * type_.bytes);
    }
    void commit_tokens(uint64_t count) {
        bin_.commit(count * type_.bytes);
        state_.tokens += static_cast<int64_t>(count);
    }
    void add_sequences(const int32_t *lengths, uint64_t count);
    void add_documents(const int64_t *sequences_each, uint64_t count);
    // Everything so far is in the files, and on the disk if `sync`. Throws, as complete() does, when they have lost their names.
    void flush(bool sync);
    // Completes the .idx, once; with `sync` both files are on the disk then.
    void complete(bool sync);
    // Gives the complete files their final names, and `described` their description, which is in PREFIX.json.partial.
    void publish(bool described);

    static std::string partial(const std::string &path) { return path + ".partial"; }

  private:
    void check_open() const {
        if (complete_) fail(prefix_, ": nothing can be added to a complete dataset");
    }

    void check_names() const;
    void name(const std::string &suffix) const; // gives one file its final name

    std::string prefix_;
    const TokenType &type_;
    WriterState state_;
    int64_t boundary_ = 0; // where the last document ends
    bool complete_ = false;
    OutputFile boundaries_, bin_, idx_; // idx_ holds the header's place and the lengths until complete() adds the rest
};
