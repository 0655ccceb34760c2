// Where documents begin inside samples: the token after each end-of-document token starts a new one.
#pragma once

#include <cstdint>
#include <vector>

// For inputs (rows, seq) at the front of tokens (rows, width): position ids (rows, seq) that restart behind each eod, a loss mask
// (rows, seq) that is 0 at each eod, and the boundaries of the documents in the flattened inputs, 0, ..., rows * seq, where each
// row starts a document. `positions` and `mask` may be null.
std::vector<int32_t> mask_documents(const int64_t *tokens, int64_t rows, int64_t width, int64_t seq, int64_t eod,
                                    int64_t *positions, float *mask);
