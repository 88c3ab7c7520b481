// Vectors of floats in the widest registers of the CPU that this is compiled for, in the vector
// extensions of GCC and Clang; bfloat16; exp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define FORERUN_LANES 16
#elif defined(__AVX2__)
#define FORERUN_LANES 8
#else
#define FORERUN_LANES 4
#endif

// Loops over registers must be unrolled whatever the compiler thinks of their size.
#if defined(__clang__)
#define FORERUN_UNROLL _Pragma("unroll")
#else
#define FORERUN_UNROLL _Pragma("GCC unroll 32")
#endif

namespace forerun {

constexpr int LANES = FORERUN_LANES;

typedef float Vec __attribute__((vector_size(4 * FORERUN_LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * FORERUN_LANES)));
typedef uint32_t BitVec __attribute__((vector_size(4 * FORERUN_LANES)));

template <class V>
inline V load(const void* from) {  // any alignment
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Vec broadcast(float x) { return Vec{} + x; }

// The sum of all lanes, always added in the same order.
inline float sum_lanes(Vec v) {
    float lane[LANES];
    store(lane, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {  // to the nearest, ties to even, as in PyTorch
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {x != x ? uint16_t(0x7fc0) : uint16_t(rounded)};
}

// exp(x) to about 2 ulp: 2^n times a polynomial of the rest (Cephes' expf). 0 below -87.
inline Vec exp_vec(Vec x) {
    const Vec clamped = x > 88.0f ? broadcast(88.0f) : x;
    const Vec shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: to an integer
    const Vec n = shifted - 12582912.0f;
    const Vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const IntVec exponent = (bits_as<IntVec>(shifted) - 0x4b400000) << 23;
    const Vec y = bits_as<Vec>(bits_as<IntVec>(p) + exponent);
    const Vec zero = {};
    const Vec known = x < -87.0f ? zero : y;
    return x != x ? x : known;
}

inline float exp_one(float x) { return exp_vec(broadcast(x))[0]; }

}  // namespace forerun
