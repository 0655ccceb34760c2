// The index arrays that fix the order of training samples, equal to Megatron-LM's bit for bit.
#pragma once

#include <cstdint>
#include <random>

#include "indexed_dataset.h"

// numpy.random.RandomState(seed).shuffle(): one generator may shuffle several arrays in turn.
class LegacyShuffler {
  public:
    explicit LegacyShuffler(uint32_t seed) : generator_(seed) {}

    template <typename T> void shuffle(T *values, int64_t count) {
        for (int64_t i = count - 1; i > 0; --i) std::swap(values[i], values[below_or_at(static_cast<uint64_t>(i))]);
    }

  private:
    uint64_t below_or_at(uint64_t bound); // uniform on 0..bound by masked rejection

    std::mt19937 generator_; // the same recurrence and seeding as NumPy's legacy MT19937
};

// `epochs` copies of first, first + 1, ..., first + documents - 1, shuffled as a whole, or, with separate_final_epoch, all but the
// last copy shuffled as a whole and then the last one.
void fill_document_index(int32_t *out, int64_t first, int64_t documents, int64_t epochs, bool separate_final_epoch,
                         LegacyShuffler &shuffler);

// Row j of (samples + 1, 2): where in document_index, and where in that document, token j * seq_length of the stream lies.
template <typename T>
void fill_sample_index(T *out, int64_t samples, const IndexedDataset &dataset, const int32_t *document_index, int64_t documents,
                       int64_t seq_length);

// 0..samples-1; [0, boundary) and [boundary, samples) are each shuffled, in that order.
template <typename T> void fill_shuffle_index(T *out, int64_t samples, int64_t boundary, LegacyShuffler &shuffler);

// For i = 0, 1, ...: the dataset whose count lags most behind its weight; the first of equals.
void fill_blend(int16_t *dataset_index, int64_t *dataset_sample_index, const double *weights, int64_t datasets, int64_t samples);

// Every sample of every dataset once, in proportion to the sizes.
void fill_exhaustive_blend(int16_t *dataset_index, int64_t *dataset_sample_index, const int64_t *sizes, int64_t datasets);
