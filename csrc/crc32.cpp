// CRC-32; see crc32.h. A text is a polynomial over GF(2), bit 0 of its first byte the highest power of x; its checksum is the remainder
// of division by kPolynomial, in which bit 31 is x^0. Where the machine multiplies such polynomials, 64 bytes are folded at a
// time: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.
#include "crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define MEGALITE_FOLDING
#include <immintrin.h>
#endif

namespace {

constexpr uint32_t kPolynomial = 0xedb88320u;

// The remainder of `value` times x.
constexpr uint32_t times_x(uint32_t value) { return (value >> 1) ^ ((0u - (value & 1u)) & kPolynomial); }

using Tables = std::array<std::array<uint32_t, 256>, 16>;

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = times_x(value);
        tables[0][i] = value;
    }
    for (size_t k = 1; k < 16; ++k)
        for (size_t i = 0; i < 256; ++i) tables[k][i] = (tables[k - 1][i] >> 8) ^ tables[0][tables[k - 1][i] & 0xff];
    return tables;
}

constexpr Tables kTables = make_tables();

// `state` is the complement of a checksum; sixteen bytes a step.
uint32_t by_tables(uint32_t state, const uint8_t *data, uint64_t bytes) {
    for (; bytes >= 16; data += 16, bytes -= 16) {
        uint32_t word[4];
        std::memcpy(word, data, 16);
        word[0] ^= state;
        state = 0;
        for (size_t k = 0; k < 4; ++k) {
            const size_t last = 15 - 4 * k;
            state ^= kTables[last][word[k] & 0xff] ^ kTables[last - 1][(word[k] >> 8) & 0xff] ^
                     kTables[last - 2][(word[k] >> 16) & 0xff] ^ kTables[last - 3][word[k] >> 24];
        }
    }
    for (; bytes > 0; ++data, --bytes) state = (state >> 8) ^ kTables[0][(state ^ *data) & 0xff];
    return state;
}

#ifdef MEGALITE_FOLDING

// The remainder of x^power, for a multiplication of 64 by 64 bits, whose result is one bit short.
constexpr int64_t remainder(int power) {
    uint32_t value = 1u << 31;
    for (int i = 0; i < power; ++i) value = times_x(value);
    return static_cast<int64_t>(value) << 1;
}

// What 16 bytes come to that stand `kBits` bits further on: a multiple of kPolynomial away from them.
template <int kBits> __attribute__((target("pclmul"))) inline __m128i moved(__m128i value) {
    constexpr int64_t low = remainder(kBits + 32), high = remainder(kBits - 32);
    const __m128i powers = _mm_set_epi64x(high, low);
    return _mm_xor_si128(_mm_clmulepi64_si128(value, powers, 0x00), _mm_clmulepi64_si128(value, powers, 0x11));
}

inline __m128i load(const uint8_t *data) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(data)); }

// Of 64 bytes or more; what is left of them, fewer than 16, is for the tables.
__attribute__((target("pclmul"))) uint32_t by_folding(uint32_t state, const uint8_t *data, uint64_t bytes) {
    __m128i folded[4];
    for (int i = 0; i < 4; ++i) folded[i] = load(data + 16 * i);
    folded[0] = _mm_xor_si128(folded[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64)
        for (int i = 0; i < 4; ++i) folded[i] = _mm_xor_si128(moved<512>(folded[i]), load(data + 16 * i));
    __m128i one = folded[0];
    for (int i = 1; i < 4; ++i) one = _mm_xor_si128(moved<128>(one), folded[i]);
    for (; bytes >= 16; data += 16, bytes -= 16) one = _mm_xor_si128(moved<128>(one), load(data));
    uint8_t last[16];
    std::memcpy(last, &one, 16);
    return by_tables(by_tables(0, last, 16), data, bytes);
}

#endif

} // namespace

uint32_t crc32(uint32_t crc, const uint8_t *data, uint64_t bytes) {
#ifdef MEGALITE_FOLDING
    if (bytes >= 64 && __builtin_cpu_supports("pclmul")) return ~by_folding(~crc, data, bytes);
#endif
    return ~by_tables(~crc, data, bytes);
}
