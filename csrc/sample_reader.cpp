// Cuts training samples out of indexed datasets; see sample_reader.h.
#include "sample_reader.h"

#include "data_error.h"

namespace {

template <typename T> void widen_from(const uint8_t *source, int64_t count, int64_t *out) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int64_t>(load<T>(source + i * static_cast<int64_t>(sizeof(T))));
}

} // namespace

void widen(const uint8_t *source, const TokenType &type, int64_t count, int64_t *out) {
    switch (type.code) {
    case 1: return widen_from<uint8_t>(source, count, out);
    case 2: return widen_from<int8_t>(source, count, out);
    case 3: return widen_from<int16_t>(source, count, out);
    case 4: return widen_from<int32_t>(source, count, out);
    case 5: return widen_from<int64_t>(source, count, out);
    case 8: return widen_from<uint16_t>(source, count, out);
    default: fail("dtype ", type.name, " does not hold token ids");
    }
}

void SampleReader::broken(int64_t sample, const char *what) const {
    fail(dataset->prefix(), ": sample ", sample, ": ", what,
         "; the index of samples does not belong to this dataset or is damaged: remove it, it is built again");
}

SampleReader::Place SampleReader::place(int64_t row) const {
    if (wide_samples) {
        const int64_t *entry = static_cast<const int64_t *>(sample_index) + 2 * row;
        return {entry[0], entry[1]};
    }
    const int32_t *entry = static_cast<const int32_t *>(sample_index) + 2 * row;
    return {entry[0], entry[1]};
}

void SampleReader::span(int64_t sample, Place &first, Place &last) const {
    if (sample < 0 || sample >= samples)
        fail(dataset->prefix(), ": sample ", sample, " asked for, but this split has samples 0 to ", samples - 1);
    const int64_t row = wide_shuffle ? static_cast<const int64_t *>(shuffle_index)[sample]
                                     : static_cast<int64_t>(static_cast<const uint32_t *>(shuffle_index)[sample]);
    if (row < 0 || row >= samples) broken(sample, "its place in the order lies outside the samples");
    first = place(row);
    last = place(row + 1);
    if (first.position < 0 || last.position < first.position || last.position >= document_count)
        broken(sample, "its documents lie outside the list of documents");
}

void SampleReader::read(int64_t sample, int64_t *out) const {
    Place first, last;
    span(sample, first, last);
    const int64_t sequences = dataset->sequences();
    // The documents lie anywhere: all index entries are on their way before the first is used, then so are the tokens.
    for (int64_t position = first.position; position <= last.position; ++position) {
        const int64_t sequence = document_index[position];
        if (sequence < 0 || sequence >= sequences) broken(sample, "a document number is too large");
        __builtin_prefetch(dataset->lengths() + 4 * sequence);
        __builtin_prefetch(dataset->offsets() + 8 * sequence);
    }
    for (int64_t position = first.position; position <= last.position; ++position) {
        const int64_t sequence = document_index[position];
        const uint8_t *source = dataset->find(sequence, position == first.position ? first.offset : 0, 0);
        if (source == nullptr) broken(sample, "a piece of it lies outside its document");
        __builtin_prefetch(source);
        __builtin_prefetch(source + 64);
    }
    int64_t left = seq_length + 1;
    for (int64_t position = first.position; position <= last.position; ++position) {
        const int64_t sequence = document_index[position];
        const int64_t begin = position == first.position ? first.offset : 0;
        const int64_t end = position == last.position ? last.offset + 1 : dataset->length(sequence);
        const int64_t count = end - begin;
        const uint8_t *source = count > left ? nullptr : dataset->find(sequence, begin, count);
        if (source == nullptr) broken(sample, "a piece of it lies outside its document");
        widen(source, dataset->type(), count, out);
        out += count;
        left -= count;
    }
    if (left != 0) broken(sample, "its pieces do not make up the sequence length");
}

std::vector<Piece> SampleReader::pieces(int64_t sample) const {
    Place first, last;
    span(sample, first, last);
    std::vector<Piece> pieces;
    for (int64_t position = first.position; position <= last.position; ++position) {
        const int64_t sequence = document_index[position];
        if (sequence < 0 || sequence >= dataset->sequences()) broken(sample, "a document number is too large");
        const int64_t begin = position == first.position ? first.offset : 0;
        const int64_t end = position == last.position ? last.offset + 1 : dataset->length(sequence);
        if (end > begin) pieces.push_back({sequence, begin, end - begin});
    }
    return pieces;
}
