// Cuts training samples out of indexed datasets: sample k of a split is seq_length + 1 consecutive tokens of its shuffled documents.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "indexed_dataset.h"

struct Piece { // tokens [offset, offset + count) of one sequence
    int64_t sequence, offset, count;
};

// One split of one dataset with its three index arrays, which the caller keeps alive.
class SampleReader {
  public:
    std::shared_ptr<const IndexedDataset> dataset;
    const int32_t *document_index = nullptr;
    int64_t document_count = 0;
    const void *sample_index = nullptr; // (samples + 1, 2), int64 when wide_samples, else int32
    bool wide_samples = false;
    const void *shuffle_index = nullptr; // (samples,), int64 when wide_shuffle, else uint32
    bool wide_shuffle = false;
    int64_t samples = 0;
    int64_t seq_length = 0;

    // Writes the seq_length + 1 tokens of sample k as int64.
    void read(int64_t sample, int64_t *out) const;
    std::vector<Piece> pieces(int64_t sample) const;

  private:
    struct Place {
        int64_t position, offset; // in document_index; in that document
    };
    Place place(int64_t row) const;
    void span(int64_t sample, Place &first, Place &last) const;
    [[noreturn]] void broken(int64_t sample, const char *what) const;
};

// Copies `count` tokens of `type` to int64.
void widen(const uint8_t *source, const TokenType &type, int64_t count, int64_t *out);
