// A 64-bit hash of memory, fast enough to check what is read from a disk.
#pragma once

#include <cstdint>
#include <cstring>

namespace content_hash_detail {

inline uint64_t mix(uint64_t hash, uint64_t value) { // one round of MurmurHash3's 64-bit finaliser
    hash ^= value;
    hash *= 0xff51afd7ed558ccdULL;
    hash ^= hash >> 33;
    return hash * 0xc4ceb9fe1a85ec53ULL;
}

} // namespace content_hash_detail

inline uint64_t content_hash(const uint8_t *data, uint64_t bytes) {
    using content_hash_detail::mix;
    const auto word = [data, bytes](uint64_t i, uint64_t size) {
        uint64_t value = 0;
        std::memcpy(&value, data + i, size < bytes - i ? size : bytes - i);
        return value;
    };
    uint64_t lane[4] = {1, 2, 3, 4}; // independent, so that the multiplications overlap
    uint64_t i = 0;
    for (; i + 32 <= bytes; i += 32)
        for (uint64_t k = 0; k < 4; ++k) {
            uint64_t value;
            std::memcpy(&value, data + i + 8 * k, 8);
            lane[k] = mix(lane[k], value);
        }
    for (; i < bytes; i += 4) lane[0] = mix(lane[0], word(i, 4));
    uint64_t hash = mix(bytes, lane[0]);
    for (int k = 1; k < 4; ++k) hash = mix(hash, lane[k]);
    return hash ^ (hash >> 33);
}
