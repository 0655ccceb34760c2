// Where documents begin inside samples; see document_masks.h.
#include "document_masks.h"

#include <algorithm>

#include "vector_clones.h"

namespace {

MEGALITE_VECTOR bool contains(const int64_t *tokens, int64_t count, int64_t eod) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) found |= tokens[i] == eod;
    return found != 0;
}

// The places of `eod` among tokens [0, seq); ends are rare, so blocks without one are passed over at vector speed.
void find_ends(const int64_t *tokens, int64_t seq, int64_t eod, std::vector<int64_t> &ends) {
    constexpr int64_t kBlock = 128;
    ends.clear();
    for (int64_t first = 0; first < seq; first += kBlock) {
        const int64_t last = std::min(seq, first + kBlock);
        if (!contains(tokens + first, last - first, eod)) continue;
        for (int64_t i = first; i < last; ++i)
            if (tokens[i] == eod) ends.push_back(i);
    }
}

} // namespace

std::vector<int32_t> mask_documents(const int64_t *tokens, int64_t rows, int64_t width, int64_t seq, int64_t eod,
                                    int64_t *positions, float *mask) {
    std::vector<int32_t> starts;
    std::vector<int64_t> ends;
    for (int64_t row = 0; row < rows; ++row) {
        find_ends(tokens + row * width, seq, eod, ends);
        starts.push_back(static_cast<int32_t>(row * seq));
        for (const int64_t end : ends) // an eod at the end of a row starts nothing: no empty document
            if (end + 1 < seq) starts.push_back(static_cast<int32_t>(row * seq + end + 1));
        if (mask != nullptr) {
            std::fill_n(mask + row * seq, seq, 1.0f);
            for (const int64_t end : ends) mask[row * seq + end] = 0.0f;
        }
        if (positions != nullptr) {
            int64_t start = 0;
            ends.push_back(seq - 1);
            for (const int64_t end : ends) {
                for (int64_t i = start; i <= end; ++i) positions[row * seq + i] = i - start;
                start = end + 1;
            }
        }
    }
    starts.push_back(static_cast<int32_t>(rows * seq));
    return starts;
}
