// Where documents begin inside samples: the token after each end-of-document token starts a new one.
#pragma once

#include <cstdint>
#include <vector>

// Position ids (rows, seq) that restart at 0 after each eod among the inputs; tokens (rows, width) with width >= seq.
inline void fill_positions(const int64_t *tokens, int64_t rows, int64_t width, int64_t seq, int64_t eod, int64_t *positions) {
    for (int64_t row = 0; row < rows; ++row) {
        int64_t position = 0;
        for (int64_t i = 0; i < seq; ++i) {
            positions[row * seq + i] = position++;
            if (tokens[row * width + i] == eod) position = 0;
        }
    }
}

// Boundaries of the documents in the flattened (rows * seq) inputs: 0, ..., rows * seq; each row starts a document.
inline std::vector<int32_t> cumulative_lengths(const int64_t *tokens, int64_t rows, int64_t width, int64_t seq, int64_t eod) {
    std::vector<int32_t> starts;
    for (int64_t row = 0; row < rows; ++row) {
        starts.push_back(static_cast<int32_t>(row * seq));
        for (int64_t i = 0; i + 1 < seq; ++i) // an eod at the end of a row starts nothing: no empty document
            if (tokens[row * width + i] == eod) starts.push_back(static_cast<int32_t>(row * seq + i + 1));
    }
    starts.push_back(static_cast<int32_t>(rows * seq));
    return starts;
}
