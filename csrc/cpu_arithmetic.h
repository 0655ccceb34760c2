// Element types and functions of the fused CPU kernels, in forms that the compiler vectorises.
#pragma once

#include <cstdint>
#include <cstring>

#define MEGALITE_INLINE inline __attribute__((always_inline))

namespace megalite {

struct Bfloat16 {
    uint16_t bits;
};

template <class To, class From>
MEGALITE_INLINE To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

MEGALITE_INLINE float wide(float value) { return value; }
MEGALITE_INLINE float wide(Bfloat16 value) { return bits_as<float>(uint32_t(value.bits) << 16); }

MEGALITE_INLINE void put(float& out, float value) { out = value; }

// Round to nearest, ties to even.
MEGALITE_INLINE void put(Bfloat16& out, float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// exp(x), relative error below 2e-7; 0 below -87.3 (no denormals), exp(88.3) above; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by its Taylor polynomial of degree 6 in Horner form, 2^n through the exponent bits.
MEGALITE_INLINE float exponential(float x) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which then lies in the low bits
    const float bounded = x > 88.3f ? 88.3f : (x < -87.3f ? -87.3f : x);
    const float shifted = bounded * 1.44269504088896341f + kShift;
    const float n = shifted - kShift;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const uint32_t power = (bits_as<uint32_t>(shifted) - bits_as<uint32_t>(kShift)) << 23;
    const float result = bits_as<float>(bits_as<uint32_t>(p) + power);
    return x < -87.3f ? 0.0f : result;
}

MEGALITE_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// A matrix handed over by Python: address of its first row and elements from row to row.
template <class T>
struct Rows {
    T* base;
    int64_t stride;
    MEGALITE_INLINE T* operator[](int64_t row) const { return base + row * stride; }
};

}  // namespace megalite
