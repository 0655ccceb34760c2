// CRC-32 as zlib computes it, so that any tool can check a .bin.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace crc32_detail {

using Tables = std::array<std::array<uint32_t, 256>, 16>;

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((0u - (value & 1u)) & 0xedb88320u);
        tables[0][i] = value;
    }
    for (size_t k = 1; k < 16; ++k)
        for (size_t i = 0; i < 256; ++i) tables[k][i] = (tables[k - 1][i] >> 8) ^ tables[0][tables[k - 1][i] & 0xff];
    return tables;
}

constexpr Tables kTables = make_tables();

} // namespace crc32_detail

// The checksum of a text that has checksum `crc` so far (0 when empty) followed by `data`; sixteen bytes a step.
inline uint32_t crc32(uint32_t crc, const uint8_t *data, uint64_t bytes) {
    const crc32_detail::Tables &table = crc32_detail::kTables;
    crc = ~crc;
    for (; bytes >= 16; data += 16, bytes -= 16) {
        uint32_t word[4];
        std::memcpy(word, data, 16);
        word[0] ^= crc;
        crc = 0;
        for (size_t k = 0; k < 4; ++k) {
            const size_t last = 15 - 4 * k;
            crc ^= table[last][word[k] & 0xff] ^ table[last - 1][(word[k] >> 8) & 0xff] ^ table[last - 2][(word[k] >> 16) & 0xff] ^
                   table[last - 3][word[k] >> 24];
        }
    }
    for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ table[0][(crc ^ *data) & 0xff];
    return ~crc;
}
