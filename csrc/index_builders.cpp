// The index arrays that fix the order of training samples; see index_builders.h.
#include "index_builders.h"

#include <algorithm>
#include <limits>
#include <vector>

uint64_t LegacyShuffler::below_or_at(uint64_t bound) {
    uint64_t mask = bound;
    for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    uint64_t value;
    if (bound <= 0xffffffffULL) {
        do value = static_cast<uint64_t>(generator_()) & mask;
        while (value > bound);
    } else {
        do {
            value = static_cast<uint64_t>(generator_()) << 32;
            value = (value | static_cast<uint64_t>(generator_())) & mask;
        } while (value > bound);
    }
    return value;
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
    int64_t row = 1, token = 0; // `token`: where the document starts in the stream
    for (int64_t position = 0; position < documents && row <= samples; ++position) {
        const int64_t sequence = document_index[position];
        if (sequence < 0 || sequence >= dataset.sequences())
            fail("document_index[", position, "] = ", sequence, ": ", dataset.prefix(), " has ", dataset.sequences(), " sequences");
        const int64_t next = token + dataset.length(sequence);
        for (; row <= samples && row * seq_length < next; ++row) {
            out[2 * row] = static_cast<T>(position);
            out[2 * row + 1] = static_cast<T>(row * seq_length - token);
        }
        token = next;
    }
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
    std::vector<int64_t> counts(static_cast<size_t>(datasets), 0);
    for (int64_t i = 0; i < samples; ++i) {
        const double progress = std::max(static_cast<double>(i), 1.0);
        int64_t chosen = 0;
        double most = std::numeric_limits<double>::lowest();
        for (int64_t d = 0; d < datasets; ++d) {
            const double lag = weights[d] * progress - static_cast<double>(counts[static_cast<size_t>(d)]);
            if (lag > most) {
                most = lag;
                chosen = d;
            }
        }
        dataset_index[i] = static_cast<int16_t>(chosen);
        dataset_sample_index[i] = counts[static_cast<size_t>(chosen)]++;
    }
}

void fill_exhaustive_blend(int16_t *dataset_index, int64_t *dataset_sample_index, const int64_t *sizes, int64_t datasets) {
    int64_t total = 0;
    for (int64_t d = 0; d < datasets; ++d) total += sizes[d];
    std::vector<int64_t> unspent, counts(static_cast<size_t>(datasets), 0);
    std::vector<double> weights;
    for (int64_t d = 0; d < datasets; ++d) {
        weights.push_back(static_cast<double>(sizes[d]) / static_cast<double>(total));
        if (sizes[d] > 0) unspent.push_back(d);
    }
    for (int64_t i = 0; i < total; ++i) {
        const double progress = std::max(static_cast<double>(i), 1.0);
        size_t chosen = 0;
        double most = std::numeric_limits<double>::lowest();
        for (size_t k = 0; k < unspent.size(); ++k) {
            const size_t d = static_cast<size_t>(unspent[k]);
            const double lag = weights[d] * progress - static_cast<double>(counts[d]);
            if (lag > most) {
                most = lag;
                chosen = k;
            }
        }
        const size_t d = static_cast<size_t>(unspent[chosen]);
        dataset_index[i] = static_cast<int16_t>(d);
        dataset_sample_index[i] = counts[d]++;
        if (counts[d] == sizes[d]) unspent.erase(unspent.begin() + static_cast<int64_t>(chosen));
    }
}
