// The index arrays that fix the order of training samples; see index_builders.h.
#include "index_builders.h"

#include <numeric>
#include <vector>

#include "blend_order.h"
#include "data_error.h"

LegacyShuffler::LegacyShuffler(uint32_t seed) {
    for (uint32_t i = 0; i < kState; ++i) { // Knuth's initialisation
        state_[i] = seed;
        seed = 1812433253u * (seed ^ (seed >> 30)) + i + 1;
    }
}

void LegacyShuffler::refill() {
    const auto twist = [this](int i, int next, int middle) {
        const uint32_t mixed = (state_[i] & 0x80000000u) | (state_[next] & 0x7fffffffu);
        state_[i] = state_[middle] ^ (mixed >> 1) ^ ((0u - (mixed & 1u)) & 0x9908b0dfu);
    };
    constexpr int kMiddle = 397;
    for (int i = 0; i < kState - kMiddle; ++i) twist(i, i + 1, i + kMiddle);
    for (int i = kState - kMiddle; i < kState - 1; ++i) twist(i, i + 1, i + kMiddle - kState);
    twist(kState - 1, 0, kMiddle - 1);
    for (int i = 0; i < kState; ++i) {
        uint32_t y = state_[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        output_[i] = y ^ (y >> 18);
    }
    used_ = 0;
}

void LegacyShuffler::draw(uint64_t bound, int64_t count, uint64_t *places) {
    uint64_t mask = bound;
    for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    int64_t drawn = 0;
    while (drawn < count) {
        const uint64_t now = bound - static_cast<uint64_t>(drawn);
        if (now <= mask >> 1) mask >>= 1;
        uint64_t value = next();
        if (now > 0xffffffffULL) value = value << 32 | next();
        // No branch on whether it is accepted: which draws are is not predictable.
        places[drawn] = value & mask;
        drawn += (value & mask) <= now;
    }
}

void fill_document_index(int32_t *out, int64_t first, int64_t documents, int64_t epochs, bool separate_final_epoch,
                         LegacyShuffler &shuffler) {
    for (int64_t epoch = 0; epoch < epochs; ++epoch)
        for (int64_t i = 0; i < documents; ++i) out[epoch * documents + i] = static_cast<int32_t>(first + i);
    const int64_t joint = documents * (separate_final_epoch ? epochs - 1 : epochs);
    shuffler.shuffle(out, joint);
    if (separate_final_epoch) shuffler.shuffle(out + joint, documents);
}

template <typename T>
void fill_sample_index(T *out, int64_t samples, const IndexedDataset &dataset, const int32_t *document_index, int64_t documents,
                       int64_t seq_length) {
    out[0] = out[1] = 0; // also when document_index starts with an empty document
    constexpr int64_t kAhead = 32; // documents are in random order, so their lengths are fetched ahead
    int64_t row = 1, token = 0;    // `token`: where the document starts in the stream
    int64_t start = seq_length;    // where row `row` starts in the stream
    for (int64_t position = 0; position < documents && row <= samples; ++position) {
        if (position + kAhead < documents) __builtin_prefetch(dataset.lengths() + 4 * static_cast<int64_t>(document_index[position + kAhead]));
        const int64_t sequence = document_index[position];
        if (sequence < 0 || sequence >= dataset.sequences())
            fail("document_index[", position, "] = ", sequence, ": ", dataset.prefix(), " has ", dataset.sequences(), " sequences");
        const int64_t next = token + dataset.length(sequence);
        for (; start < next && row <= samples; ++row, start += seq_length) {
            out[2 * row] = static_cast<T>(position);
            out[2 * row + 1] = static_cast<T>(start - token);
        }
        token = next;
    }
    dataset.check_read();
    if (row <= samples) fail(dataset.prefix(), ": its documents hold too few tokens for ", samples, " samples");
}

template void fill_sample_index(int32_t *, int64_t, const IndexedDataset &, const int32_t *, int64_t, int64_t);
template void fill_sample_index(int64_t *, int64_t, const IndexedDataset &, const int32_t *, int64_t, int64_t);

template <typename T> void fill_shuffle_index(T *out, int64_t samples, int64_t boundary, LegacyShuffler &shuffler) {
    for (int64_t i = 0; i < samples; ++i) out[i] = static_cast<T>(i);
    shuffler.shuffle(out, boundary);
    shuffler.shuffle(out + boundary, samples - boundary);
}

template void fill_shuffle_index(uint32_t *, int64_t, int64_t, LegacyShuffler &);
template void fill_shuffle_index(int64_t *, int64_t, int64_t, LegacyShuffler &);

void fill_blend(int16_t *dataset_index, int64_t *dataset_sample_index, const double *weights, int64_t datasets, int64_t samples) {
    BlendOrder order(weights, datasets);
    for (int64_t i = 0; i < samples; ++i) {
        const int64_t dataset = order.next();
        dataset_index[i] = static_cast<int16_t>(dataset);
        dataset_sample_index[i] = order.count(dataset) - 1;
    }
}

void fill_exhaustive_blend(int16_t *dataset_index, int64_t *dataset_sample_index, const int64_t *sizes, int64_t datasets,
                           int64_t samples) {
    const int64_t total = std::accumulate(sizes, sizes + datasets, int64_t{0});
    std::vector<double> weights;
    for (int64_t d = 0; d < datasets; ++d) weights.push_back(static_cast<double>(sizes[d]) / static_cast<double>(total));
    BlendOrder order(weights.data(), datasets);
    for (int64_t d = 0; d < datasets; ++d)
        if (sizes[d] == 0) order.retire(d);
    for (int64_t i = 0; i < samples; ++i) {
        const int64_t dataset = order.next();
        dataset_index[i] = static_cast<int16_t>(dataset);
        dataset_sample_index[i] = order.count(dataset) - 1;
        if (order.count(dataset) == sizes[dataset]) order.retire(dataset);
    }
}

void count_datasets(const int16_t *dataset_index, int64_t samples, int64_t *counts, int64_t datasets) {
    // Four tables in turn: equal neighbours would wait for each other's sum.
    std::vector<int64_t> tables(static_cast<size_t>(4 * datasets), 0);
    const auto count = [&](int64_t i, int64_t table) {
        const int64_t dataset = dataset_index[i];
        if (dataset < 0 || dataset >= datasets) fail("dataset_index[", i, "] = ", dataset, ": the blend has ", datasets, " datasets");
        ++tables[static_cast<size_t>(table * datasets + dataset)];
    };
    int64_t i = 0;
    for (; i + 4 <= samples; i += 4)
        for (int64_t table = 0; table < 4; ++table) count(i + table, table);
    for (; i < samples; ++i) count(i, 0);
    for (int64_t d = 0; d < datasets; ++d)
        for (int64_t table = 0; table < 4; ++table) counts[d] += tables[static_cast<size_t>(table * datasets + d)];
}
