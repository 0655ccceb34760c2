// CRC-32 as zlib computes it, so that any tool can check a .bin.
#pragma once

#include <cstdint>

// The checksum of a text that has checksum `crc` so far (0 when empty) followed by `data`.
uint32_t crc32(uint32_t crc, const uint8_t *data, uint64_t bytes);
