// CRC-32 as zlib computes it, so that any tool can check a .bin.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace crc32_detail {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((0u - (value & 1u)) & 0xedb88320u);
        tables[0][i] = value;
    }
    for (size_t k = 1; k < 8; ++k)
        for (size_t i = 0; i < 256; ++i) tables[k][i] = (tables[k - 1][i] >> 8) ^ tables[0][tables[k - 1][i] & 0xff];
    return tables;
}

constexpr Tables kTables = make_tables();

} // namespace crc32_detail

// The checksum of a text that has checksum `crc` so far (0 when empty) followed by `data`; eight bytes a step.
inline uint32_t crc32(uint32_t crc, const uint8_t *data, uint64_t bytes) {
    const crc32_detail::Tables &table = crc32_detail::kTables;
    crc = ~crc;
    for (; bytes >= 8; data += 8, bytes -= 8) {
        uint32_t low, high;
        std::memcpy(&low, data, 4);
        std::memcpy(&high, data + 4, 4);
        low ^= crc;
        crc = table[7][low & 0xff] ^ table[6][(low >> 8) & 0xff] ^ table[5][(low >> 16) & 0xff] ^ table[4][low >> 24] ^
              table[3][high & 0xff] ^ table[2][(high >> 8) & 0xff] ^ table[1][(high >> 16) & 0xff] ^ table[0][high >> 24];
    }
    for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ table[0][(crc ^ *data) & 0xff];
    return ~crc;
}
