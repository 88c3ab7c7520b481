// Vectors of floats in the widest registers of the CPU that this is compiled for, in the vector
// extensions of GCC and Clang; bfloat16; exp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
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
#if FORERUN_LANES == 16 || defined(__aarch64__)
constexpr int VECTOR_REGISTERS = 32;
#else
constexpr int VECTOR_REGISTERS = 16;
#endif

typedef float Vec __attribute__((vector_size(4 * FORERUN_LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * FORERUN_LANES)));
typedef uint32_t BitVec __attribute__((vector_size(4 * FORERUN_LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * FORERUN_LANES)));
typedef int8_t ByteVec __attribute__((vector_size(FORERUN_LANES)));

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

inline Vec broadcast(float x) { return x - Vec{}; }  // x + 0 is an addition: of -0

// a * b + c, rounded once where the CPU has an instruction for it, else twice. Compilers must not
// fuse on their own (`-ffp-contract=off`): whether they do follows from the CPU they tune for and
// from the code around it, so a tile of one row would have other bits than one of several.
#if defined(__FMA__) || defined(__aarch64__)
inline float mul_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float mul_add(float a, float b, float c) { return a * b + c; }
#endif

#if FORERUN_LANES == 16
inline Vec mul_add(Vec a, Vec b, Vec c) {
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif FORERUN_LANES == 8 && defined(__FMA__)
inline Vec mul_add(Vec a, Vec b, Vec c) {
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#elif FORERUN_LANES == 4 && defined(__FMA__)
inline Vec mul_add(Vec a, Vec b, Vec c) {
    return (Vec)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
}
#elif defined(__aarch64__)
inline Vec mul_add(Vec a, Vec b, Vec c) {
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
inline Vec mul_add(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
inline Vec mul_add(Vec a, float b, Vec c) { return mul_add(a, broadcast(b), c); }
inline Vec mul_add(Vec a, Vec b, float c) { return mul_add(a, b, broadcast(c)); }

// Combines the lower half of the lanes with the upper one, until one is left.
template <class Combine>
inline float reduce_lanes(Vec v, Combine combine) {
    float lane[LANES];
    store(lane, v);
    FORERUN_UNROLL
    for (int width = LANES / 2; width > 0; width /= 2) {
        FORERUN_UNROLL
        for (int i = 0; i < width; i++) lane[i] = combine(lane[i], lane[i + width]);
    }
    return lane[0];
}

// The sum of all lanes, always added in the same order.
inline float sum_lanes(Vec v) {
    return reduce_lanes(v, [](float low, float high) { return low + high; });
}

// The largest lane, if none is NaN.
inline float max_lanes(Vec v) {
    return reduce_lanes(v, [](float low, float high) { return low > high ? low : high; });
}

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
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

// LANES values as float32.
inline Vec load_floats(const float* from) { return load<Vec>(from); }
inline Vec load_floats(const BFloat16* from) {
    return bits_as<Vec>(__builtin_convertvector(load<HalfVec>(from), BitVec) << 16);
}

inline Vec load_floats(const int8_t* from) {
#if FORERUN_LANES == 16
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif FORERUN_LANES == 8 && defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return __builtin_convertvector(load<ByteVec>(from), Vec);
#endif
}

inline Vec load_floats(const Float16* from) {
#if FORERUN_LANES == 16
    return (Vec)_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from));
#elif FORERUN_LANES == 8 && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(load<__m128i>(from));
#else
    const BitVec bits = __builtin_convertvector(load<HalfVec>(from), BitVec);
    const BitVec size = (bits & 0x7fffu) << 13, rebias = BitVec{} + 0x38000000u;  // 112 << 23
    // Below 2^-14 there is no leading one: that of 2^-14 is added and subtracted.
    const Vec small = bits_as<Vec>(size + 0x38800000u) - 6.103515625e-5f;
    const BitVec normal = size + (size >= 0x0f800000u ? rebias + rebias : rebias);
    const BitVec value = size < 0x00800000u ? bits_as<BitVec>(small) : normal;
    return bits_as<Vec>(value | (bits & 0x8000u) << 16);
#endif
}

// The same as `from_float`, of LANES values.
inline HalfVec to_bfloat16(Vec x) {
    const BitVec bits = bits_as<BitVec>(x);
    const BitVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(x != x ? BitVec{} + 0x7fc0 : rounded, HalfVec);
}
inline void store_floats(float* to, Vec x) { store(to, x); }
inline void store_floats(BFloat16* to, Vec x) { store(to, to_bfloat16(x)); }

// x as a value of T.
template <class T>
inline Vec rounded_to(Vec x) {
    T values[LANES];
    store_floats(values, x);
    return load_floats(values);
}

#if FORERUN_LANES == 16
#define FORERUN_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define FORERUN_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif FORERUN_LANES == 8
#define FORERUN_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define FORERUN_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FORERUN_LOW 0, 4, 1, 5
#define FORERUN_HIGH 2, 6, 3, 7
#endif
#if defined(__clang__)
#define FORERUN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FORERUN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// Rows become columns, in place. Interleaving the two halves of the rows rotates the bits of
// (row, column) by one, and log2(LANES) times that is a transpose.
inline void transpose(Vec (&rows)[LANES]) {
    FORERUN_UNROLL
    for (int step = 1; step < LANES; step *= 2) {
        Vec next[LANES];
        FORERUN_UNROLL
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = FORERUN_SHUFFLE(rows[i], rows[i + LANES / 2], FORERUN_LOW);
            next[2 * i + 1] = FORERUN_SHUFFLE(rows[i], rows[i + LANES / 2], FORERUN_HIGH);
        }
        FORERUN_UNROLL
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}

// exp(x) to about 2 ulp: 2^n times a polynomial of the rest (Cephes' expf). 0 below -87.
inline Vec exp_vec(Vec x) {
    const Vec clamped = x > 88.0f ? broadcast(88.0f) : x;
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec shifted = mul_add(clamped, 1.44269504088896341f, magic);
    const Vec n = shifted - magic;
    const Vec r = mul_add(n, 2.12194440e-4f, mul_add(n, -0.693359375f, clamped));
    Vec p = broadcast(1.9875691500e-4f);
    p = mul_add(p, r, 1.3981999507e-3f);
    p = mul_add(p, r, 8.3334519073e-3f);
    p = mul_add(p, r, 4.1665795894e-2f);
    p = mul_add(p, r, 1.6666665459e-1f);
    p = mul_add(p, r, 5.0000001201e-1f);
    p = mul_add(p * r, r, r) + 1.0f;
    const IntVec exponent = (bits_as<IntVec>(shifted) - 0x4b400000) << 23;
    const Vec y = bits_as<Vec>(bits_as<IntVec>(p) + exponent);
    const Vec zero = {};
    const Vec known = x < -87.0f ? zero : y;
    return x != x ? x : known;
}

inline float exp_one(float x) { return exp_vec(broadcast(x))[0]; }

inline Vec sigmoid_vec(Vec x) { return 1.0f / (1.0f + exp_vec(-x)); }

// tanh(x) to about 2 ulp: an odd polynomial near 0 (Cephes' tanhf), else by exp(2 |x|).
inline Vec tanh_vec(Vec x) {
    const Vec size = bits_as<Vec>(bits_as<BitVec>(x) & 0x7fffffffu);
    const Vec z = x * x;
    Vec p = broadcast(-5.70498872745e-3f);
    p = mul_add(p, z, 2.06390887954e-2f);
    p = mul_add(p, z, -5.37397155531e-2f);
    p = mul_add(p, z, 1.33314422036e-1f);
    p = mul_add(p, z, -3.33332819422e-1f);
    const Vec near = mul_add(p * z, x, x);
    const Vec large = 1.0f - 2.0f / (exp_vec(size + size) + 1.0f);
    const Vec far = x < 0.0f ? -large : large;
    return size < 0.625f ? near : far;  // NaN: far, which is NaN
}

// GELU in its tanh form (arXiv 1606.08415).
inline Vec gelu_tanh_vec(Vec x) {
    const Vec inner = 0.7978845608028654f * mul_add(0.044715f * x * x, x, x);
    return 0.5f * x * (1.0f + tanh_vec(inner));
}

}  // namespace forerun
