// The index arrays that fix the order of training samples, equal to Megatron-LM's bit for bit.
#pragma once

#include <cstdint>
#include <utility>

#include "indexed_dataset.h"

// numpy.random.RandomState(seed).shuffle(): one generator may shuffle several arrays in turn.
class LegacyShuffler {
  public:
    explicit LegacyShuffler(uint32_t seed);

    template <typename T> void shuffle(T *values, int64_t count) {
        // The places are drawn some swaps ahead, so that the memory they touch is on its way before it is needed.
        constexpr int64_t kAhead = 128;
        uint64_t places[kAhead + 1];
        for (int64_t i = count - 1; i > 0;) {
            const int64_t swaps = i < kAhead ? i : kAhead;
            draw(static_cast<uint64_t>(i), swaps, places);
            for (int64_t k = 0; k < swaps; ++k) __builtin_prefetch(values + places[k], 1);
            for (int64_t k = 0; k < swaps; ++k, --i) std::swap(values[i], values[places[k]]);
        }
    }

  private:
    static constexpr int kState = 624;

    void refill();
    uint32_t next() {
        if (used_ == kState) refill();
        return output_[used_++];
    }
    // places[k] uniform on 0..bound - k by masked rejection; room for one more than `count`.
    void draw(uint64_t bound, int64_t count, uint64_t *places);

    uint32_t state_[kState], output_[kState]; // MT19937
    int used_ = kState;
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

// The first `samples` of an order that has every sample of every dataset once, in proportion to the sizes.
void fill_exhaustive_blend(int16_t *dataset_index, int64_t *dataset_sample_index, const int64_t *sizes, int64_t datasets,
                           int64_t samples);

// Adds to counts[d] how often d is among `samples` entries. Throws where one is not from 0 to datasets - 1.
void count_datasets(const int16_t *dataset_index, int64_t samples, int64_t *counts, int64_t datasets);
