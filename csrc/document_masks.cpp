// Where documents begin inside samples; see document_masks.h.
#include "document_masks.h"

#include <algorithm>

#include "vector_clones.h"

namespace {

// A vector of comparisons joined, so that blocks without `eod` are passed over at vector speed.
template <int64_t kCount> inline __attribute__((always_inline)) bool contains(const int64_t *tokens, int64_t eod) {
    int64_t found = 0;
    for (int64_t i = 0; i < kCount; ++i) found |= tokens[i] == eod;
    return found != 0;
}

// Writes the places of `eod` among tokens [0, seq) to `ends`, and returns how many there are; ends are rare.
MEGALITE_VECTOR int64_t find_ends(const int64_t *tokens, int64_t seq, int64_t eod, int64_t *ends) {
    constexpr int64_t kBlock = 128, kPart = 16;
    int64_t count = 0, first = 0;
    for (; first + kBlock <= seq; first += kBlock) {
        if (!contains<kBlock>(tokens + first, eod)) continue;
        for (int64_t part = first; part < first + kBlock; part += kPart) {
            if (!contains<kPart>(tokens + part, eod)) continue;
            for (int64_t i = part; i < part + kPart; ++i)
                if (tokens[i] == eod) ends[count++] = i;
        }
    }
    for (; first < seq; ++first)
        if (tokens[first] == eod) ends[count++] = first;
    return count;
}

} // namespace

std::vector<int32_t> mask_documents(const int64_t *tokens, int64_t rows, int64_t width, int64_t seq, int64_t eod,
                                    int64_t *positions, float *mask) {
    std::vector<int32_t> starts;
    std::vector<int64_t> places(static_cast<size_t>(seq) + 1);
    int64_t *const ends = places.data();
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t count = find_ends(tokens + row * width, seq, eod, ends);
        starts.push_back(static_cast<int32_t>(row * seq));
        for (int64_t i = 0; i < count; ++i) // an eod at the end of a row starts nothing: no empty document
            if (ends[i] + 1 < seq) starts.push_back(static_cast<int32_t>(row * seq + ends[i] + 1));
        if (mask != nullptr) {
            std::fill_n(mask + row * seq, seq, 1.0f);
            for (int64_t i = 0; i < count; ++i) mask[row * seq + ends[i]] = 0.0f;
        }
        if (positions != nullptr) {
            int64_t start = 0;
            ends[count] = seq - 1;
            for (int64_t document = 0; document <= count; ++document) {
                for (int64_t i = start; i <= ends[document]; ++i) positions[row * seq + i] = i - start;
                start = ends[document] + 1;
            }
        }
    }
    starts.push_back(static_cast<int32_t>(rows * seq));
    return starts;
}
