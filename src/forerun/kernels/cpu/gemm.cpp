// y = x Wᵀ for tokens x [M, K] and a packed weight W [N, K], with what follows it fused in.
//
// W is cut into panels of PANEL rows. In a panel, the PANEL values of one k are neighbours (of two
// or four k where one instruction multiplies so many): a register holds LANES outputs, and a tile
// of tokens by panels reads W once, in order. Each output is the sum over k in ascending order, one
// accumulator per output, whatever the tile: it does not depend on the number of tokens, their
// place in the batch or the number of threads.
//
//   float32   float32 weights and tokens
//   widened   the same, for weights whose values all fit into bfloat16: they are stored so, which
//             halves the bytes, and the results are the same bits
//   halves    the same, for weights whose values all fit into float16
//   bfloat16  bfloat16 weights and tokens, products added in float32; float32 tokens are rounded
//   int8      weights in groups of 32 k with one scale each, tokens quantized likewise when they are
//             read (as llama.cpp's Q8_0); products of a group are added as integers
//   grouped   unsigned codes of 4 or 8 bits in groups of 16 or 32 k: w = code * scale + least, which
//             becomes float32 when it is read, and is then computed with as in float32
//   grouped_int8  the same weights, and tokens quantized as for int8; products of codes are added as
//             integers (as llama.cpp does)
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <vector>

#include "norm.h"
#include "parallel.h"

namespace forerun {

constexpr int PANEL = 2 * LANES;
constexpr int GROUP = 32;  // k that share a scale, int8

constexpr int REGISTERS = VECTOR_REGISTERS * 3 / 4;  // for accumulators

enum Kind : int32_t {
    FLOAT32 = 0,
    BFLOAT16 = 1,
    INT8 = 2,
    WIDENED = 3,
    GROUPED = 4,
    HALVES = 5,
    GROUPED_INT8 = 6
};

constexpr bool has_codes(int32_t kind) { return kind == GROUPED || kind == GROUPED_INT8; }
constexpr bool has_int8_tokens(int32_t kind) { return kind == INT8 || kind == GROUPED_INT8; }

// In Python: `_Weight` in gemm.py.
struct Weight {
    const void* data;
    const void* scales;  // int8: [panels][K / GROUP][PANEL] bfloat16
                         // grouped: [panels][K / group][1 or 2][PANEL], scales and, then, leasts
                         // or zero points; of int8, the multiples of `supers` groups follow what
                         // they are multiples of: [1 or 2][PANEL] float16
    const float* bias;   // [N] or null
    int64_t n, k;
    int32_t kind;
    int32_t bfloat16_tokens;  // type of x and of what is returned; 0: float32
    int32_t bits, group;      // grouped: of a code; k that share a scale
    int32_t scale_type;       // grouped: `ScaleType`
    int32_t zero;             // grouped: least = -zero * scale; 0: leasts are stored, or
    int32_t points;           // the zero of each group
    int32_t supers;           // grouped, int8 scales: groups of a block, a power of two
};

enum ScaleType : int32_t {
    FLOAT32_SCALES = 0,
    FLOAT16_SCALES = 1,
    BFLOAT16_SCALES = 2,
    INT8_SCALES = 3
};

// The tokens of a GEMM, as its kind reads them.
struct Tokens {
    const void* values;
    int64_t stride;        // of a token, in values
    // Of int8, and neighbours are the M tokens.
    const float* scales;    // [K / GROUP][M]
    const int32_t* starts;  // [K / columns][M]: what sums of products begin with
    const float* sums;      // the same, grouped: of a token's values, each times its scale
    int64_t count;          // M
};

// What a tile reads into the L2 cache while it computes, mostly for its successors: the weights that
// the next tiles multiply, or a half of them. Hardware follows a stream too late.
struct Ahead {
    const char* data;
    int64_t panel_bytes;
    bool whole;  // else the half that begins at `data`, and as much of every following panel
};

// `step`: of the tile's loop, which multiplies two registers of every panel.
// Inlined at once, else GCC takes it for a function without effect.
template <int PANELS>
__attribute__((always_inline)) inline void prefetch(const Ahead& ahead, int64_t step) {
    constexpr int64_t REGISTER = 4 * LANES;
    constexpr int L2 = 2;
    FORERUN_UNROLL
    for (int p = 0; p < PANELS; p++) {
        const char* panel = ahead.data + p * ahead.panel_bytes;
        if (ahead.whole) {
            __builtin_prefetch(panel + 2 * step * REGISTER, 0, L2);
            if (REGISTER >= 64) __builtin_prefetch(panel + (2 * step + 1) * REGISTER, 0, L2);
        } else {
            __builtin_prefetch(panel + step * REGISTER, 0, L2);
        }
    }
}

// body(m, j) for all m and j, unrolled, so that arrays which it indexes are registers.
template <int M, int N, class Body>
__attribute__((always_inline)) inline void each(Body&& body) {
    FORERUN_UNROLL
    for (int m = 0; m < M; m++) {
        FORERUN_UNROLL
        for (int j = 0; j < N; j++) body(m, j);
    }
}

// NEAR_TOKENS of kinds that are converted when they are read, or multiplied by several instructions.
constexpr int NEAR_IF_CONVERTED = LANES < 16 ? 0 : 2;

// How weights of a kind are multiplied. ACCUMULATORS: registers per LANES outputs. Tiles of up to
// NEAR_TOKENS wait for memory more than for arithmetic, and read their own weights ahead instead of
// those of their successors: they would wait for both.
template <int KIND>
struct Traits;

// Code c of every word.
template <int BITS>
inline Vec code(BitVec word, int c) {
    const BitVec bits = (word >> (BITS * c)) & ((1u << BITS) - 1);
    return __builtin_convertvector(bits_as<IntVec>(bits), Vec);
}

// A tile of weights that are stored one by one, and become float32 when they are read.
template <class Stored, int M, int PANELS>
inline void tile_of_values(const Weight& w, int64_t panel, const Tokens& tokens, int64_t first,
                           const Ahead& ahead, float* out) {
    constexpr int64_t PER_STEP = 4 / sizeof(Stored);  // k for which `prefetch` reads ahead
    const int64_t size = w.k * PANEL;
    const Stored* weights = static_cast<const Stored*>(w.data) + panel * size;
    const float* x = static_cast<const float*>(tokens.values) + first * tokens.stride;
    Vec sum[M][2 * PANELS];
    each<M, 2 * PANELS>([&](int m, int j) { sum[m][j] = Vec{}; });
    for (int64_t k = 0; k < w.k; k++) {
        if (k % PER_STEP == 0) prefetch<PANELS>(ahead, k / PER_STEP);
        Vec value[2 * PANELS];
        FORERUN_UNROLL
        for (int j = 0; j < 2 * PANELS; j++)
            value[j] = load_floats(weights + (j / 2) * size + k * PANEL + (j % 2) * LANES);
        FORERUN_UNROLL
        for (int m = 0; m < M; m++) {
            const Vec token = broadcast(x[m * tokens.stride + k]);
            FORERUN_UNROLL
            for (int j = 0; j < 2 * PANELS; j++) sum[m][j] = mul_add(value[j], token, sum[m][j]);
        }
    }
    each<M, 2 * PANELS>(
        [&](int m, int j) { store(out + (m * 2 * PANELS + j) * LANES, sum[m][j]); });
}

template <typename Value>
struct TraitsOfValues {
    static constexpr int ACCUMULATORS = 1;
    static constexpr int NEAR_TOKENS = sizeof(Value) == 4 ? 2 : NEAR_IF_CONVERTED;

    template <int M, int PANELS>
    static void tile(const Weight& w, int64_t panel, const Tokens& tokens, int64_t first,
                     const Ahead& ahead, float* out) {
        tile_of_values<Value, M, PANELS>(w, panel, tokens, first, ahead, out);
    }
};

template <>
struct Traits<FLOAT32> : TraitsOfValues<float> {};

template <>
struct Traits<HALVES> : TraitsOfValues<Float16> {};

template <>
struct Traits<WIDENED> {
    static constexpr int ACCUMULATORS = 1;
    static constexpr int NEAR_TOKENS = NEAR_IF_CONVERTED;

    // Stored as BFLOAT16: two neighbouring k per 32 bits.
    template <int M, int PANELS>
    static void tile(const Weight& w, int64_t panel, const Tokens& tokens, int64_t first,
                     const Ahead& ahead, float* out) {
        const int64_t pairs = w.k / 2, size = pairs * PANEL;
        const uint32_t* weights = static_cast<const uint32_t*>(w.data) + panel * size;
        const float* x = static_cast<const float*>(tokens.values) + first * tokens.stride;
        Vec sum[M][2 * PANELS];
        each<M, 2 * PANELS>([&](int m, int j) { sum[m][j] = Vec{}; });
        for (int64_t k = 0; k < pairs; k++) {
            prefetch<PANELS>(ahead, k);
            BitVec value[2 * PANELS];
            FORERUN_UNROLL
            for (int j = 0; j < 2 * PANELS; j++)
                value[j] = load<BitVec>(weights + (j / 2) * size + k * PANEL + (j % 2) * LANES);
            FORERUN_UNROLL
            for (int odd = 0; odd < 2; odd++) {
                Vec wide[2 * PANELS];
                FORERUN_UNROLL
                for (int j = 0; j < 2 * PANELS; j++)
                    wide[j] = bits_as<Vec>(odd ? value[j] & 0xffff0000u : value[j] << 16);
                FORERUN_UNROLL
                for (int m = 0; m < M; m++) {
                    const Vec token = broadcast(x[m * tokens.stride + 2 * k + odd]);
                    FORERUN_UNROLL
                    for (int j = 0; j < 2 * PANELS; j++)
                        sum[m][j] = mul_add(wide[j], token, sum[m][j]);
                }
            }
        }
        each<M, 2 * PANELS>(
            [&](int m, int j) { store(out + (m * 2 * PANELS + j) * LANES, sum[m][j]); });
    }
};

template <>
struct Traits<BFLOAT16> {
    static constexpr int ACCUMULATORS = 1;

    // Two neighbouring k per 32 bits.
#if defined(__AVX512BF16__) && FORERUN_LANES == 16
    static constexpr int NEAR_TOKENS = 4;
    static inline Vec multiply_add(Vec sum, BitVec pairs, uint32_t token) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, bits_as<__m512bh>(pairs),
                                     bits_as<__m512bh>(_mm512_set1_epi32(int(token))));
    }
#else
    static constexpr int NEAR_TOKENS = NEAR_IF_CONVERTED;
    static inline Vec multiply_add(Vec sum, BitVec pairs, uint32_t token) {
        sum = mul_add(bits_as<Vec>(pairs << 16), bits_as<float>(token << 16), sum);
        return mul_add(bits_as<Vec>(pairs & 0xffff0000u), bits_as<float>(token & 0xffff0000u), sum);
    }
#endif

    template <int M, int PANELS>
    static void tile(const Weight& w, int64_t panel, const Tokens& tokens, int64_t first,
                     const Ahead& ahead, float* out) {
        const int64_t pairs = w.k / 2, size = pairs * PANEL;
        const uint32_t* weights = static_cast<const uint32_t*>(w.data) + panel * size;
        const char* x = static_cast<const char*>(tokens.values) + 2 * first * tokens.stride;
        Vec sum[M][2 * PANELS];
        each<M, 2 * PANELS>([&](int m, int j) { sum[m][j] = Vec{}; });
        for (int64_t k = 0; k < pairs; k++) {
            prefetch<PANELS>(ahead, k);
            BitVec value[2 * PANELS];
            FORERUN_UNROLL
            for (int j = 0; j < 2 * PANELS; j++)
                value[j] = load<BitVec>(weights + (j / 2) * size + k * PANEL + (j % 2) * LANES);
            FORERUN_UNROLL
            for (int m = 0; m < M; m++) {
                const uint32_t token = load<uint32_t>(x + 2 * m * tokens.stride + 4 * k);
                FORERUN_UNROLL
                for (int j = 0; j < 2 * PANELS; j++)
                    sum[m][j] = multiply_add(sum[m][j], value[j], token);
            }
        }
        each<M, 2 * PANELS>(
            [&](int m, int j) { store(out + (m * 2 * PANELS + j) * LANES, sum[m][j]); });
    }
};

// Whether one instruction adds four products of bytes.
#if (FORERUN_LANES == 16 && defined(__AVX512VNNI__)) || (FORERUN_LANES == 8 && defined(__AVXVNNI__))
#define FORERUN_VNNI 1
#else
#define FORERUN_VNNI 0
#endif

// Products of four codes and four values of a token, added to `sum`: of up to 4 bits, or of 8. Those
// of 8 are OFFSET less than they are stored.
#if FORERUN_VNNI
constexpr int32_t OFFSET = 0;
inline IntVec add_products(IntVec sum, BitVec codes, int32_t token) {
#if FORERUN_LANES == 16
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(token));
#else
    return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(token));
#endif
}
inline IntVec add_small_products(IntVec sum, BitVec codes, int32_t token) {
    return add_products(sum, codes, token);
}
#elif defined(__ARM_FEATURE_DOTPROD) && FORERUN_LANES == 4
constexpr int32_t OFFSET = 128;
inline IntVec add_small_products(IntVec sum, BitVec codes, int32_t token) {
    return (IntVec)vdotq_s32((int32x4_t)sum, bits_as<int8x16_t>(codes),
                             bits_as<int8x16_t>(vdupq_n_s32(token)));
}
inline IntVec add_products(IntVec sum, BitVec codes, int32_t token) {
    return add_small_products(sum, codes ^ 0x80808080u, token);
}
#elif FORERUN_LANES > 4 || defined(__SSSE3__)
// Products of unsigned and signed bytes are added in pairs to 16 bits, which hold those of 4-bit codes.
constexpr int32_t OFFSET = 0;
template <int FACTOR>
inline IntVec scaled_products(BitVec codes, int32_t token) {
#if FORERUN_LANES == 16
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(token));
    return (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(FACTOR));
#elif FORERUN_LANES == 8
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(token));
    return (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(FACTOR));
#else
    const __m128i pairs = _mm_maddubs_epi16((__m128i)codes, _mm_set1_epi32(token));
    return (IntVec)_mm_madd_epi16(pairs, _mm_set1_epi16(FACTOR));
#endif
}
inline IntVec add_small_products(IntVec sum, BitVec codes, int32_t token) {
    return sum + scaled_products<1>(codes, token);
}
inline IntVec add_products(IntVec sum, BitVec codes, int32_t token) {
    return sum + scaled_products<1>(codes & 0x0f0f0f0fu, token) +
           scaled_products<16>((codes >> 4) & 0x0f0f0f0fu, token);
}
#else
constexpr int32_t OFFSET = 0;
inline IntVec add_products(IntVec sum, BitVec codes, int32_t token) {
    for (int i = 0; i < 4; i++)
        sum += bits_as<IntVec>((codes >> (8 * i)) & 0xffu) * int8_t(token >> (8 * i));
    return sum;
}
inline IntVec add_small_products(IntVec sum, BitVec codes, int32_t token) {
    return add_products(sum, codes, token);
}
#endif

// Of a tile with sums of integers besides those in float32: registers per token that have both. All
// of its panels if they fit, else one after the other.
template <int M, int PANELS>
constexpr int registers_at_once() {
    return 4 * M * PANELS <= REGISTERS ? 2 * PANELS : 1;
}

template <>
struct Traits<INT8> {
    static constexpr int ACCUMULATORS = 2;  // of a group as integers, and of all in float32
    static constexpr int NEAR_TOKENS = NEAR_IF_CONVERTED;

#if FORERUN_VNNI
    static constexpr bool BIASED = true;  // the instruction multiplies weights + 128
    static inline IntVec multiply_add(IntVec sum, IntVec weights, int32_t token) {
        return add_products(sum, bits_as<BitVec>(weights) ^ 0x80808080u, token);
    }
#elif defined(__ARM_FEATURE_DOTPROD) && FORERUN_LANES == 4
    static constexpr bool BIASED = false;
    static inline IntVec multiply_add(IntVec sum, IntVec weights, int32_t token) {
        return (IntVec)vdotq_s32((int32x4_t)sum, bits_as<int8x16_t>(weights),
                                 bits_as<int8x16_t>(vdupq_n_s32(token)));
    }
#elif FORERUN_LANES == 16 && defined(__AVX512BW__)
    // Bytes widened to 16 bits, the even and the odd ones, whose products are added in pairs.
    static constexpr bool BIASED = false;
    static inline IntVec multiply_add(IntVec sum, IntVec weights, int32_t token) {
        const __m512i w = (__m512i)weights, x = _mm512_set1_epi32(token);
        const __m512i even = _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8),
                                               _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
        const __m512i odd = _mm512_madd_epi16(_mm512_srai_epi16(w, 8), _mm512_srai_epi16(x, 8));
        return sum + (IntVec)even + (IntVec)odd;
    }
#elif FORERUN_LANES == 8 && defined(__AVX2__)
    // The instruction multiplies unsigned by signed bytes: the tokens' signs move to the weights.
    // Both are within +-127, so a sum of two products fits into 16 bits.
    static constexpr bool BIASED = false;
    static inline IntVec multiply_add(IntVec sum, IntVec weights, int32_t token) {
        const __m256i x = _mm256_set1_epi32(token);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x),
                                                   _mm256_sign_epi8((__m256i)weights, x));
        return sum + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
#elif FORERUN_LANES == 4 && defined(__SSSE3__)
    static constexpr bool BIASED = false;
    static inline IntVec multiply_add(IntVec sum, IntVec weights, int32_t token) {
        const __m128i x = _mm_set1_epi32(token);
        const __m128i pairs = _mm_maddubs_epi16(_mm_abs_epi8(x),
                                                _mm_sign_epi8((__m128i)weights, x));
        return sum + (IntVec)_mm_madd_epi16(pairs, _mm_set1_epi16(1));
    }
#else
    static constexpr bool BIASED = false;
    static inline IntVec multiply_add(IntVec sum, IntVec weights, int32_t token) {
        const IntVec x = IntVec{} + token;
        sum += ((weights << 24) >> 24) * ((x << 24) >> 24);
        sum += ((weights << 16) >> 24) * ((x << 16) >> 24);
        sum += ((weights << 8) >> 24) * ((x << 8) >> 24);
        return sum + (weights >> 24) * (x >> 24);
    }
#endif

    template <int M, int PANELS>
    static void tile(const Weight& w, int64_t panel, const Tokens& tokens, int64_t first,
                     const Ahead& ahead, float* out) {
        const int64_t groups = (w.k + GROUP - 1) / GROUP, size = groups * GROUP * PANEL;
        const char* weights = static_cast<const char*>(w.data) + panel * size;
        const BFloat16* scales =
            static_cast<const BFloat16*>(w.scales) + panel * groups * PANEL;
        const char* x = static_cast<const char*>(tokens.values) + first * tokens.stride;
        Vec sum[M][2 * PANELS];
        each<M, 2 * PANELS>([&](int m, int j) { sum[m][j] = Vec{}; });
        constexpr int AT_ONCE = registers_at_once<M, PANELS>();
        for (int64_t g = 0; g < groups; g++) {
            const float* x_scales = tokens.scales + g * tokens.count + first;
            const int32_t* starts = tokens.starts + g * tokens.count + first;
            FORERUN_UNROLL
            for (int from = 0; from < 2 * PANELS; from += AT_ONCE) {
                IntVec dot[M][AT_ONCE];
                each<M, AT_ONCE>([&](int m, int j) { dot[m][j] = IntVec{} + starts[m]; });
                for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 4) {
                    if (from == 0) prefetch<PANELS>(ahead, k / 4);
                    IntVec value[AT_ONCE];
                    FORERUN_UNROLL
                    for (int j = 0; j < AT_ONCE; j++)
                        value[j] = load<IntVec>(weights + ((from + j) / 2) * size + k * PANEL +
                                                ((from + j) % 2) * 4 * LANES);
                    FORERUN_UNROLL
                    for (int m = 0; m < M; m++) {
                        const int32_t token = load<int32_t>(x + m * tokens.stride + k);
                        FORERUN_UNROLL
                        for (int j = 0; j < AT_ONCE; j++)
                            dot[m][j] = multiply_add(dot[m][j], value[j], token);
                    }
                }
                FORERUN_UNROLL
                for (int j = from; j < from + AT_ONCE; j++) {
                    const Vec scale = load_floats(scales + (j / 2) * groups * PANEL + g * PANEL +
                                                  (j % 2) * LANES);
                    FORERUN_UNROLL
                    for (int m = 0; m < M; m++)
                        sum[m][j] = mul_add(__builtin_convertvector(dot[m][j - from], Vec),
                                            scale * x_scales[m], sum[m][j]);
                }
            }
        }
        each<M, 2 * PANELS>(
            [&](int m, int j) { store(out + (m * 2 * PANELS + j) * LANES, sum[m][j]); });
    }
};

// Where scales and leasts of a panel are, and how they are read: LANES rows at a time. Groups are in
// blocks, of one each but where their scales are multiples of two values of the block.
struct GroupScales {
    const char* scales;
    int64_t stride, head, block;  // bytes: of a group, before the groups of a block, of a block
    int64_t blocks, in_block;     // of the panel; groups of each
    int32_t type;
    bool has_second, points;
    float zero;  // negative

    // What the groups of a block share.
    struct Shared {
        Vec scale, least;
    };

    GroupScales(const Weight& w, int64_t panel)
        : head(0), in_block(1), type(w.scale_type), has_second(w.zero == 0),
          points(w.points != 0), zero(-float(w.zero)) {
        const int64_t values = PANEL * (has_second ? 2 : 1);
        stride = values * (type == FLOAT32_SCALES ? 4 : type == INT8_SCALES ? 1 : 2);
        if (type == INT8_SCALES) head = 2 * values, in_block = w.supers;
        block = head + in_block * stride;
        blocks = w.k / w.group / in_block;
        scales = static_cast<const char*>(w.scales) + panel * panel_bytes();
    }
    int64_t panel_bytes() const { return blocks * block; }
    void prefetch(const char* group) const {
        __builtin_prefetch(group);
        if (stride > 64) __builtin_prefetch(group + stride - 64);
    }
    Vec at(const char* from, int64_t i) const {
        if (type == INT8_SCALES) return load_floats(reinterpret_cast<const int8_t*>(from) + i);
        if (type == FLOAT16_SCALES) return load_floats(reinterpret_cast<const Float16*>(from) + i);
        if (type == BFLOAT16_SCALES)
            return load_floats(reinterpret_cast<const BFloat16*>(from) + i);
        return load_floats(reinterpret_cast<const float*>(from) + i);
    }
    Shared shared(const char* from, int64_t lane) const {
        if (type != INT8_SCALES) return {Vec{}, Vec{}};
        const Float16* halves = reinterpret_cast<const Float16*>(from) + lane;
        return {load_floats(halves), has_second ? load_floats(halves + PANEL) : Vec{}};
    }
    void read(const char* group, const Shared& of, int64_t lane, Vec& scale, Vec& least) const {
        scale = at(group, lane);
        if (type == INT8_SCALES) scale *= of.scale;
        if (!has_second) {
            least = scale * zero;
        } else {
            least = at(group, PANEL + lane);
            if (type == INT8_SCALES) least *= of.least;
            if (points) least *= -scale;
        }
    }
};

// body(group, shared) for every group in order: its scales in the first panel, and what its block's
// groups share, of each register's rows.
template <int PANELS, class Body>
__attribute__((always_inline)) inline void each_group(const GroupScales& scales, Body&& body) {
    const int64_t panel_bytes = scales.panel_bytes();
    for (int64_t b = 0; b < scales.blocks; b++) {
        const char* block = scales.scales + b * scales.block;
        GroupScales::Shared shared[2 * PANELS];
        FORERUN_UNROLL
        for (int j = 0; j < 2 * PANELS; j++)
            shared[j] = scales.shared(block + j / 2 * panel_bytes, j % 2 * LANES);
        for (int64_t g = 0; g < scales.in_block; g++) {
            const char* group = block + scales.head + g * scales.stride;
            FORERUN_UNROLL
            for (int p = 0; p < PANELS; p++) scales.prefetch(group + (p + PANELS) * panel_bytes);
            body(group, shared);
        }
    }
}

// body(k, value) for every k in order; value: 2 * PANELS registers of the panels' rows.
// code * scale is exact, so w is rounded once, with or without FMA.
template <int BITS, int PANELS, class Body>
__attribute__((always_inline)) inline void each_column(const Weight& w, int64_t panel,
                                                       Body&& body) {
    constexpr int CODES = 32 / BITS;
    const int64_t size = w.k / CODES * PANEL;
    const uint32_t* words = static_cast<const uint32_t*>(w.data) + panel * size;
    const GroupScales scales(w, panel);
    const int64_t panel_bytes = scales.panel_bytes();
    int64_t k = 0;
    const auto of_group = [&](const char* group, const GroupScales::Shared* shared)
                              __attribute__((always_inline)) {
        Vec scale[2 * PANELS], least[2 * PANELS];
        FORERUN_UNROLL
        for (int j = 0; j < 2 * PANELS; j++)
            scales.read(group + j / 2 * panel_bytes, shared[j], j % 2 * LANES, scale[j], least[j]);
        for (const int64_t end = k + w.group; k < end; k += CODES) {
            BitVec word[2 * PANELS];
            FORERUN_UNROLL
            for (int j = 0; j < 2 * PANELS; j++)
                word[j] = load<BitVec>(words + (j / 2) * size + k / CODES * PANEL +
                                       (j % 2) * LANES);
            FORERUN_UNROLL
            for (int c = 0; c < CODES; c++) {
                Vec value[2 * PANELS];
                FORERUN_UNROLL
                for (int j = 0; j < 2 * PANELS; j++)
                    value[j] = mul_add(code<BITS>(word[j], c), scale[j], least[j]);
                body(k + c, value);
            }
        }
    };
    each_group<PANELS>(scales, of_group);
}

// Of codes: `Own::tile_of`, by their bits.
template <class Own>
struct TraitsOfCodes {
    template <int M, int PANELS>
    static void tile(const Weight& w, int64_t panel, const Tokens& tokens, int64_t first,
                     const Ahead& ahead, float* out) {
        if (w.bits == 4)
            Own::template tile_of<4, M, PANELS>(w, panel, tokens, first, ahead, out);
        else
            Own::template tile_of<8, M, PANELS>(w, panel, tokens, first, ahead, out);
    }
};

template <>
struct Traits<GROUPED> : TraitsOfCodes<Traits<GROUPED>> {
    static constexpr int ACCUMULATORS = 1;
    static constexpr int NEAR_TOKENS = 0;

    template <int BITS, int M, int PANELS>
    static void tile_of(const Weight& w, int64_t panel, const Tokens& tokens, int64_t first,
                        const Ahead& ahead, float* out) {
        const float* x = static_cast<const float*>(tokens.values) + first * tokens.stride;
        Vec sum[M][2 * PANELS];
        each<M, 2 * PANELS>([&](int m, int j) { sum[m][j] = Vec{}; });
        each_column<BITS, PANELS>(w, panel, [&](int64_t k, const Vec(&value)[2 * PANELS]) {
            constexpr int CODES = 32 / BITS;
            if (k % CODES == 0) prefetch<PANELS>(ahead, k / CODES);
            FORERUN_UNROLL
            for (int m = 0; m < M; m++) {
                const Vec token = broadcast(x[m * tokens.stride + k]);
                FORERUN_UNROLL
                for (int j = 0; j < 2 * PANELS; j++)
                    sum[m][j] = mul_add(value[j], token, sum[m][j]);
            }
        });
        each<M, 2 * PANELS>(
            [&](int m, int j) { store(out + (m * 2 * PANELS + j) * LANES, sum[m][j]); });
    }
};

// The columns whose products are added as integers.
inline int64_t columns_of_sum(const Weight& w) {
    return w.kind == GROUPED_INT8 && w.group % GROUP != 0 ? GROUP / 2 : GROUP;
}

// What products' sums must have in addition, per value of the token: codes stand for as much less.
inline int32_t bias_of(const Weight& w) {
    if (w.kind == INT8) return Traits<INT8>::BIASED ? -128 : 0;
    return (w.bits == 8 ? OFFSET : 0) - w.zero;
}

template <>
struct Traits<GROUPED_INT8> : TraitsOfCodes<Traits<GROUPED_INT8>> {
    static constexpr int ACCUMULATORS = 2;
    static constexpr int NEAR_TOKENS = NEAR_IF_CONVERTED;

    template <int BITS, int M, int PANELS>
    static void tile_of(const Weight& w, int64_t panel, const Tokens& tokens, int64_t first,
                        const Ahead& ahead, float* out) {
        constexpr int CODES = 32 / BITS, AT_ONCE = registers_at_once<M, PANELS>();
        const int64_t size = w.k / CODES * PANEL, columns = columns_of_sum(w);
        const uint32_t* words = static_cast<const uint32_t*>(w.data) + panel * size;
        const char* x = static_cast<const char*>(tokens.values) + first * tokens.stride;
        const int32_t* starts = tokens.starts + first;
        const float* x_sums = tokens.sums + first;
        const GroupScales scales(w, panel);
        const int64_t panel_bytes = scales.panel_bytes();
        Vec sum[M][2 * PANELS];
        each<M, 2 * PANELS>([&](int m, int j) { sum[m][j] = Vec{}; });
        int64_t k = 0, step = 0;
        const auto of_group = [&](const char* group, const GroupScales::Shared* shared)
                                  __attribute__((always_inline)) {
            for (const int64_t end = k + w.group; k < end; k += columns) {
                const float* x_scales = tokens.scales + uint64_t(k) / GROUP * tokens.count + first;
                FORERUN_UNROLL
                for (int from = 0; from < 2 * PANELS; from += AT_ONCE) {
                    IntVec dot[M][AT_ONCE];
                    each<M, AT_ONCE>([&](int m, int j) { dot[m][j] = IntVec{} + starts[m]; });
                    const uint32_t* row = words + step * PANEL;
                    const char* token = x + k;
                    for (int i = 0; i < columns / CODES; i++, row += PANEL, token += CODES) {
                        if (from == 0) prefetch<PANELS>(ahead, step + i);
                        BitVec word[AT_ONCE];
                        FORERUN_UNROLL
                        for (int j = 0; j < AT_ONCE; j++)
                            word[j] = load<BitVec>(row + ((from + j) / 2) * size +
                                                   ((from + j) % 2) * LANES);
                        FORERUN_UNROLL
                        for (int half = 0; half < (BITS == 4 ? 2 : 1); half++) {
                            BitVec codes[AT_ONCE];
                            FORERUN_UNROLL
                            for (int j = 0; j < AT_ONCE; j++)
                                codes[j] =
                                    BITS == 4 ? (word[j] >> (4 * half)) & 0x0f0f0f0fu : word[j];
                            FORERUN_UNROLL
                            for (int m = 0; m < M; m++) {
                                const int32_t four =
                                    load<int32_t>(token + m * tokens.stride + 4 * half);
                                FORERUN_UNROLL
                                for (int j = 0; j < AT_ONCE; j++)
                                    dot[m][j] =
                                        BITS == 4 ? add_small_products(dot[m][j], codes[j], four)
                                                  : add_products(dot[m][j], codes[j], four);
                            }
                        }
                    }
                    FORERUN_UNROLL
                    for (int j = from; j < from + AT_ONCE; j++) {
                        Vec scale, least;
                        const char* of_panel = group + j / 2 * panel_bytes;
                        scales.read(of_panel, shared[j], j % 2 * LANES, scale, least);
                        FORERUN_UNROLL
                        for (int m = 0; m < M; m++)
                            sum[m][j] = mul_add(__builtin_convertvector(dot[m][j - from], Vec),
                                                scale * x_scales[m], sum[m][j]);
                        if (!scales.has_second) continue;
                        FORERUN_UNROLL
                        for (int m = 0; m < M; m++)
                            sum[m][j] = mul_add(least, x_sums[m], sum[m][j]);
                    }
                }
                step += columns / CODES;
                starts += tokens.count, x_sums += tokens.count;
            }
        };
        each_group<PANELS>(scales, of_group);
        each<M, 2 * PANELS>(
            [&](int m, int j) { store(out + (m * 2 * PANELS + j) * LANES, sum[m][j]); });
    }
};

// A grouped panel as one of float32.
template <int BITS>
void widen_panel(const Weight& w, int64_t panel, float* to) {
    each_column<BITS, 1>(w, panel, [&](int64_t k, const Vec(&value)[2]) {
        store(to + k * PANEL, value[0]);
        store(to + k * PANEL + LANES, value[1]);
    });
}

using Tile = void (*)(const Weight&, int64_t panel, const Tokens&, int64_t first, const Ahead&,
                      float* out);

// The tiles of M tokens: as many panels as the registers hold, and of a single one.
template <int KIND, int M>
struct Shape {
    // Codes, scales and leasts take registers, too.
    static constexpr int MOST = has_codes(KIND) ? REGISTERS / 12 : 4;
    static constexpr int FREE = (REGISTERS - (KIND == GROUPED ? 8 : 0)) /
                                (2 * M * Traits<KIND>::ACCUMULATORS);
    // The sums of three tokens by two panels are 12 of 16 registers: the rest does not hold the
    // weights of both panels and a token.
    static constexpr bool FEW = REGISTERS == 12 && M == 3;
    static constexpr int PANELS = FREE >= MOST ? MOST : FREE >= 2 && !FEW ? 2 : 1;
    static Tile several() { return &Traits<KIND>::template tile<M, PANELS>; }
    static Tile single() { return &Traits<KIND>::template tile<M, 1>; }
};

struct Tiles {
    Tile several, single;
    int panels;  // of `several`
};

// Of int8 with VNNI, as many as there are registers for the sums of a panel in float32, and for integers
// of one of its two registers: where a product takes more instructions, registers share some of them.
template <int KIND>
constexpr int MAX_TOKENS =
    REGISTERS / (Traits<KIND>::ACCUMULATORS == 1 ? 2 : FORERUN_VNNI ? 3 : 4);

template <int KIND, int M>
void fill_tiles(Tiles* table) {
    if constexpr (M > 0) {
        using S = Shape<KIND, M>;
        table[M] = {S::several(), S::single(), S::PANELS};
        fill_tiles<KIND, M - 1>(table);
    }
}

template <int KIND>
const Tiles& tiles_of(int tokens) {
    static const auto* table = [] {
        auto* filled = new Tiles[MAX_TOKENS<KIND> + 1];
        fill_tiles<KIND, MAX_TOKENS<KIND>>(filled);
        return filled;
    }();
    return table[tokens];
}

// A finished part of the output: rows of M tokens by `columns` outputs.
struct Part {
    const float* sums;  // [M][width]
    int64_t width, first_token, tokens, first_column, columns;
    int64_t share;  // of the panels, by `share_of`
};

inline int64_t panels_of(const Weight& w) { return (w.n + PANEL - 1) / PANEL; }

// The weight of the GEMM after this one, where that is known.
thread_local const Weight* next_gemm = nullptr;

template <int KIND>
int64_t panel_bytes(const Weight& w) {
    if (KIND == INT8) return (w.k + GROUP - 1) / GROUP * GROUP * PANEL;
    if (has_codes(KIND)) return w.k * PANEL * w.bits / 8;
    return w.k * PANEL * (KIND == FLOAT32 ? 4 : 2);
}

// How far a tile reads its own weights ahead, where it does so.
constexpr int64_t NEAR_BYTES = 1024;

template <int KIND>
int64_t near_tokens(const Weight& w) {
    const bool few_bytes = KIND == GROUPED_INT8 && w.bits == 4;
    return few_bytes ? 0 : Traits<KIND>::NEAR_TOKENS;
}

// Panels [begin, end) of tokens [first, first + count), tile by tile; sink(part) gets each.
template <int KIND, class Sink>
void multiply(const Weight& w, const Tokens& tokens, int64_t first, int64_t count, int64_t begin,
              int64_t end, int64_t share, Sink& sink) {
    alignas(64) float sums[REGISTERS * LANES];
    const int64_t tiles = (count + MAX_TOKENS<KIND> - 1) / MAX_TOKENS<KIND>;
    const int64_t largest = (count + tiles - 1) / tiles;
    const int step = tiles_of<KIND>(int(largest)).panels;
    const int64_t bytes = panel_bytes<KIND>(w);
    const char* data = static_cast<const char*>(w.data);
    const bool near = count <= near_tokens<KIND>(w);
    const char* after = next_gemm == nullptr ? data : static_cast<const char*>(next_gemm->data);
    for (int64_t panel = begin; panel < end; panel += step) {
        const char* next = panel + step < end ? data + (panel + step) * bytes : after;
        if (near) next = data + panel * bytes + NEAR_BYTES;
        for (int64_t t = 0; t < tiles; t++) {
            // A single tile reads all of the next panels ahead, or the first two a half each.
            const Ahead ahead = {t == 1 ? next + bytes / 2 : next, bytes, tiles == 1};
            const int64_t token = first + count * t / tiles;
            const int64_t size = first + count * (t + 1) / tiles - token;
            const Tiles& choice = tiles_of<KIND>(int(size));
            // A smaller last tile may hold more panels than `step`.
            const bool whole = choice.panels == step && panel + step <= end;
            for (int64_t p = panel; p < std::min(panel + step, end); p += whole ? step : 1) {
                (whole ? choice.several : choice.single)(w, p, tokens, token, ahead, sums);
                const int64_t width = (whole ? step : 1) * PANEL, column = p * PANEL;
                sink(Part{sums, width, token, size, column, std::min(width, w.n - column), share});
            }
        }
    }
}

// Memory for intermediate results; of the calling thread, and kept.
template <class T, int USE>
std::vector<T>& kept_scratch() {
    static thread_local std::vector<T> kept;
    return kept;
}

template <class T, int USE>
T* scratch(int64_t size) {
    std::vector<T>& kept = kept_scratch<T, USE>();
    if (int64_t(kept.size()) < size) kept.resize(size);
    return kept.data();
}

constexpr int64_t WIDENED_PANELS = 2;        // grouped, at once
constexpr int DIRECT_TILES = REGISTERS / 12;  // that make float32 of codes, each for itself

// `multiply` of a grouped weight. Panels that more tiles read become float32 once for all.
template <class Sink>
void multiply_grouped(const Weight& w, const Tokens& tokens, int64_t first, int64_t count,
                      int64_t begin, int64_t end, int64_t share, Sink& sink) {
    if (count <= DIRECT_TILES * MAX_TOKENS<GROUPED>)
        return multiply<GROUPED>(w, tokens, first, count, begin, end, share, sink);
    float* wide = scratch<float, 8>(WIDENED_PANELS * w.k * PANEL);
    for (int64_t panel = begin; panel < end; panel += WIDENED_PANELS) {
        const int64_t panels = std::min(WIDENED_PANELS, end - panel);
        for (int64_t p = 0; p < panels; p++)
            (w.bits == 4 ? widen_panel<4> : widen_panel<8>)(w, panel + p, wide + p * w.k * PANEL);
        Weight plain = w;
        plain.data = wide, plain.n = std::min(panels * PANEL, w.n - panel * PANEL);
        const auto moved = [&](Part part) {
            part.first_column += panel * PANEL;
            sink(part);
        };
        multiply<FLOAT32>(plain, tokens, first, count, 0, panels, share, moved);
    }
}

// Panels that one thread takes at a time.
inline int64_t share_of(const Weight& w, int threads) {
    const int64_t panels = panels_of(w);
    const int64_t share = threads > 1 ? (panels / (4 * threads) + 3) / 4 * 4 : panels;
    return std::max<int64_t>(share, 4);
}

constexpr int64_t TOKEN_BLOCK = 192;  // tokens for which a panel stays in the cache

template <int KIND, class Sink>
void multiply_all(const Weight& w, const Tokens& tokens, int64_t m, int threads, Sink&& sink) {
    const int64_t panels = panels_of(w), blocks = (m + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    const int64_t share = share_of(w, threads);
    const int64_t shares = (panels + share - 1) / share;
    parallel_for(shares * blocks, threads, [&](int64_t i) {
        const int64_t begin = i % shares * share, block = i / shares;
        const int64_t first = m * block / blocks, end = m * (block + 1) / blocks;
        const int64_t last = std::min(begin + share, panels), count = end - first;
        if constexpr (KIND == GROUPED)
            multiply_grouped(w, tokens, first, count, begin, last, i % shares, sink);
        else
            multiply<KIND>(w, tokens, first, count, begin, last, i % shares, sink);
    });
}

// Bytes 0, 2, 4 and 6, next to each other.
inline uint64_t even_bytes(uint64_t word) {
    word &= 0x00ff00ff00ff00ffull;
    word = (word | word >> 8) & 0x0000ffff0000ffffull;
    return (word | word >> 16) & 0xffffffffull;
}

// The sum of all lanes, of integers.
inline int32_t sum_lanes(IntVec v) {
    int32_t lane[LANES];
    store(lane, v);
    FORERUN_UNROLL
    for (int width = LANES / 2; width > 0; width /= 2) {
        FORERUN_UNROLL
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    }
    return lane[0];
}

// A group's values -> integers and their scale; sums: of both halves. NaN if one is not finite.
inline float quantize_group(const Vec (&value)[GROUP / LANES], int8_t* out, int32_t (&sums)[2]) {
    constexpr int REGISTERS_OF_HALF = GROUP / LANES / 2;
    Vec most = Vec{}, invalid = Vec{};
    FORERUN_UNROLL
    for (int i = 0; i < GROUP / LANES; i++) {
        const Vec size = bits_as<Vec>(bits_as<BitVec>(value[i]) & 0x7fffffffu);
        most = size > most ? size : most;
        invalid += value[i] * 0.0f;
    }
    const float largest = max_lanes(most), inverse = largest > 0 ? 127.0f / largest : 0.0f;
    const Vec magic = broadcast(12582912.0f);
    FORERUN_UNROLL
    for (int half = 0; half < 2; half++) {
        IntVec sum = IntVec{};
        FORERUN_UNROLL
        for (int i = half * REGISTERS_OF_HALF; i < (half + 1) * REGISTERS_OF_HALF; i++) {
            const Vec rounded = mul_add(value[i], broadcast(inverse), magic);  // to an integer
            const IntVec integers = bits_as<IntVec>(rounded) - 0x4b400000;
            store(out + i * LANES, __builtin_convertvector(integers, ByteVec));
            sum += integers;
        }
        sums[half] = sum_lanes(sum);
    }
    return largest / 127.0f + sum_lanes(invalid);
}

// What `quantize_token` fills, besides a token's values: every `stride`-th is the token's.
struct TokenScales {
    float* scales;
    int32_t* starts;
    float* sums;
    int64_t stride;
};

// Starts: `bias` times the sum of the values, `columns` each. By pairs: of eight values the even ones
// come first, as a word of 4-bit codes has them.
template <class T>
void quantize_token(const T* x, int64_t k, int64_t columns, int32_t bias, bool by_pairs,
                    int8_t* out, const TokenScales& of) {
    for (int64_t g = 0; g * GROUP < k; g++) {
        const int64_t count = std::min<int64_t>(GROUP, k - g * GROUP);
        T last[GROUP] = {};
        const T* from = x + g * GROUP;
        if (count < GROUP) from = std::copy_n(from, count, last) - count;
        Vec value[GROUP / LANES];
        FORERUN_UNROLL
        for (int i = 0; i < GROUP / LANES; i++) value[i] = load_floats(from + i * LANES);
        int32_t halves[2];
        int8_t* to = out + g * GROUP;
        const float scale = quantize_group(value, to, halves);
        of.scales[g * of.stride] = scale;
        for (int i = 0; by_pairs && i < GROUP; i += 8) {
            const uint64_t word = load<uint64_t>(to + i);
            store(to + i, even_bytes(word) | even_bytes(word >> 8) << 32);
        }
        if (columns == GROUP) halves[0] += halves[1];
        for (int64_t i = 0; i * columns < count; i++) {
            const int64_t at = (g * GROUP / columns + i) * of.stride;
            of.starts[at] = bias * halves[i], of.sums[at] = scale * float(halves[i]);
        }
    }
}

// The tokens as the weight's kind reads them.
template <class T>
Tokens prepare_tokens(const Weight& w, const T* x, int64_t m, int threads) {
    if (w.kind == BFLOAT16 && std::is_same_v<T, float>) {
        BFloat16* values = scratch<BFloat16, 5>(m * w.k);
        parallel_for(m, m >= 64 ? threads : 1, [&](int64_t t) {
            for (int64_t i = t * w.k; i < (t + 1) * w.k; i++)
                values[i] = from_float<BFloat16>(to_float(x[i]));
        });
        return {values, w.k, nullptr, nullptr, nullptr, m};
    }
    if (w.kind == GROUPED && std::is_same_v<T, BFloat16>) {
        float* values = scratch<float, 9>(m * w.k);
        parallel_for(m, m >= 64 ? threads : 1, [&](int64_t t) {
            for (int64_t i = t * w.k; i < (t + 1) * w.k; i++) values[i] = to_float(x[i]);
        });
        return {values, w.k, nullptr, nullptr, nullptr, m};
    }
    if (!has_int8_tokens(w.kind)) return {x, w.k, nullptr, nullptr, nullptr, m};
    const int64_t groups = (w.k + GROUP - 1) / GROUP, size = groups * GROUP;
    const int64_t columns = columns_of_sum(w), steps = (w.k + columns - 1) / columns;
    const bool by_pairs = w.kind == GROUPED_INT8 && w.bits == 4;
    int8_t* values = scratch<int8_t, 0>(m * size);
    float* scales = scratch<float, 1>(m * groups);
    int32_t* starts = scratch<int32_t, 2>(m * steps);
    float* sums = scratch<float, 10>(m * steps);
    parallel_for(m, m >= 64 ? threads : 1, [&](int64_t t) {
        const TokenScales of = {scales + t, starts + t, sums + t, m};
        quantize_token(x + t * w.k, w.k, columns, bias_of(w), by_pairs, values + t * size, of);
    });
    return {values, size, scales, starts, sums, m};
}

template <class T, class Sink>
void gemm(const Weight& w, const void* x, int64_t m, int threads, Sink&& sink) {
    const Tokens tokens = prepare_tokens(w, static_cast<const T*>(x), m, threads);
    if (w.kind == INT8)
        multiply_all<INT8>(w, tokens, m, threads, sink);
    else if (w.kind == BFLOAT16)
        multiply_all<BFLOAT16>(w, tokens, m, threads, sink);
    else if (w.kind == GROUPED)
        multiply_all<GROUPED>(w, tokens, m, threads, sink);
    else if (w.kind == GROUPED_INT8)
        multiply_all<GROUPED_INT8>(w, tokens, m, threads, sink);
    else if constexpr (std::is_same_v<T, float>) {
        if (w.kind == WIDENED)
            multiply_all<WIDENED>(w, tokens, m, threads, sink);
        else if (w.kind == HALVES)
            multiply_all<HALVES>(w, tokens, m, threads, sink);
        else
            multiply_all<FLOAT32>(w, tokens, m, threads, sink);
    }
}

// LANES outputs of a token from a part's column i on; past its last, the weight's padding.
inline Vec outputs(const Weight& w, const Part& part, int64_t t, int64_t i) {
    const Vec sums = load<Vec>(part.sums + t * part.width + i);
    if (w.bias == nullptr) return sums;
    float bias[LANES] = {};
    std::copy_n(w.bias + part.first_column + i, std::min<int64_t>(LANES, part.columns - i), bias);
    return sums + load<Vec>(bias);
}

// store(values, i) for LANES outputs of a token at a time, and store_one(value, i) for the rest.
template <class Store, class StoreOne>
void each_output(const Weight& w, const Part& part, int64_t t, Store&& store,
                 StoreOne&& store_one) {
    int64_t i = 0;
    for (; i + LANES <= part.columns; i += LANES) store(outputs(w, part, t, i), i);
    if (i == part.columns) return;
    const Vec rest = outputs(w, part, t, i);
    for (int l = 0; i + l < part.columns; l++) store_one(rest[l], i + l);
}

template <class T>
void gemm_plain(const Weight& w, const void* x, int64_t m, void* out, int threads) {
    gemm<T>(w, x, m, threads, [&](const Part& part) {
        for (int64_t t = 0; t < part.tokens; t++) {
            T* row = static_cast<T*>(out) + (part.first_token + t) * w.n + part.first_column;
            each_output(
                w, part, t, [&](Vec x, int64_t i) { store_floats(row + i, x); },
                [&](float x, int64_t i) { row[i] = from_float<T>(x); });
        }
    });
}

// In Python: `_AddNorm` in gemm.py.
struct AddNorm {
    const void* residual;  // [M, N]
    const void* norm_weight;
    void* total;   // [M, N]: residual + x Wᵀ + b
    void* normed;  // [M, N]: its RMSNorm
    float eps;
};

template <class T>
void gemm_add_norm(const Weight& w, const void* x, int64_t m, const AddNorm& add,
                   int threads) {
    T* total = static_cast<T*>(add.total);
    gemm<T>(w, x, m, threads, [&](const Part& part) {
        for (int64_t t = 0; t < part.tokens; t++) {
            const int64_t at = (part.first_token + t) * w.n + part.first_column;
            const T* residual = static_cast<const T*>(add.residual) + at;
            T* row = total + at;
            each_output(
                w, part, t,
                [&](Vec x, int64_t i) { store_floats(row + i, load_floats(residual + i) + x); },
                [&](float x, int64_t i) { row[i] = from_float<T>(to_float(residual[i]) + x); });
        }
    });
    parallel_for(m, m >= 64 ? threads : 1, [&](int64_t t) {
        rms_norm_row(total + t * w.n, static_cast<const T*>(add.norm_weight), w.n, add.eps,
                     static_cast<T*>(add.normed) + t * w.n);
    });
}

template <class T>
void gemm_silu_mul(const Weight& w, const void* x, int64_t m, void* out,
                   int threads) {
    float* gate_up = scratch<float, 3>(m * w.n);
    gemm<T>(w, x, m, threads, [&](const Part& part) {
        for (int64_t t = 0; t < part.tokens; t++) {
            float* row = gate_up + (part.first_token + t) * w.n + part.first_column;
            each_output(
                w, part, t, [&](Vec x, int64_t i) { store(row + i, x); },
                [&](float x, int64_t i) { row[i] = x; });
        }
    });
    const int64_t half = w.n / 2;
    parallel_for(m, m >= 16 ? threads : 1, [&](int64_t t) {
        const float* gate = gate_up + t * w.n;
        silu_mul_row(gate, gate + half, half, static_cast<T*>(out) + t * half);
    });
}

// The largest outputs of a token so far, one per lane. NaN counts as infinite.
struct Best {
    Vec value;
    IntVec id;
};

// [M] ids: the largest output, the lowest of equals; -1 if there is a NaN or +inf, or only -inf.
template <class T>
void gemm_argmax(const Weight& w, const void* x, int64_t m, int64_t* ids,
                 int threads) {
    const int64_t shares = (panels_of(w) + share_of(w, threads) - 1) / share_of(w, threads);
    IntVec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const Best none = {broadcast(-INFINITY), IntVec{} + int32_t(w.n)};
    std::vector<Best>& best = kept_scratch<Best, 4>();
    best.assign(size_t(m * shares), none);
    gemm<T>(w, x, m, threads, [&](const Part& part) {
        for (int64_t t = 0; t < part.tokens; t++) {
            Best& kept = best[size_t((part.first_token + t) * shares + part.share)];
            Best found = kept;
            for (int64_t i = 0; i < part.columns; i += LANES) {
                const Vec all = rounded_to<T>(outputs(w, part, t, i));
                const Vec value = lane < int32_t(part.columns - i) ? all : broadcast(-INFINITY);
                const Vec ordered = value != value ? broadcast(INFINITY) : value;
                const IntVec larger = ordered > found.value;
                found.value = larger ? ordered : found.value;
                found.id = larger ? lane + int32_t(part.first_column + i) : found.id;
            }
            kept = found;
        }
    });
    for (int64_t t = 0; t < m; t++) {
        float largest = -INFINITY;
        int64_t id = -1;
        for (int64_t s = 0; s < shares; s++) {
            const Best& found = best[size_t(t * shares + s)];
            for (int l = 0; l < LANES; l++) {
                const bool earlier = found.value[l] == largest && found.id[l] < id;
                if (found.value[l] > largest || earlier)
                    largest = found.value[l], id = found.id[l];
            }
        }
        ids[t] = std::isfinite(largest) ? id : -1;
    }
}

// Row r of the weight to its place in the panels.
template <class T>
void pack_row(const T* row, int64_t r, int64_t k, int32_t kind, void* data, BFloat16* scales) {
    const int64_t panel = r / PANEL, lane = r % PANEL;
    if (kind == FLOAT32) {
        float* to = static_cast<float*>(data) + panel * k * PANEL + lane;
        for (int64_t i = 0; i < k; i++) to[i * PANEL] = to_float(row[i]);
    } else if (kind == BFLOAT16 || kind == WIDENED) {
        BFloat16* to = static_cast<BFloat16*>(data) + panel * k * PANEL;
        for (int64_t i = 0; i < k; i++)
            to[(i / 2 * PANEL + lane) * 2 + i % 2] = from_float<BFloat16>(to_float(row[i]));
    } else {
        const int64_t groups = (k + GROUP - 1) / GROUP;
        int8_t* to = static_cast<int8_t*>(data) + panel * groups * GROUP * PANEL;
        for (int64_t g = 0; g < groups; g++) {
            float largest = 0;
            for (int64_t i = g * GROUP; i < std::min((g + 1) * GROUP, k); i++)
                largest = std::max(largest, std::fabs(to_float(row[i])));
            // Rounded up to bfloat16, so that no value exceeds 127.
            const uint32_t bits = bits_as<uint32_t>(largest / 127.0f);
            const BFloat16 scale = {uint16_t((bits + 0xffff) >> 16)};
            scales[(panel * groups + g) * PANEL + lane] = scale;
            const float step = to_float(scale);
            for (int64_t i = g * GROUP; i < (g + 1) * GROUP; i++) {
                const float value = i < k && step > 0 ? to_float(row[i]) / step : 0.0f;
                to[(i / 4 * PANEL + lane) * 4 + i % 4] = int8_t(std::lrintf(value));
            }
        }
    }
}

// Value `i` of a panel's.
inline float float_of(const Float16* values, int64_t i) {
    return load_floats(values + i / LANES * LANES)[i % LANES];
}

// Row `id` of a grouped weight.
template <class T>
void take_grouped_row(const Weight& w, int64_t id, T* out) {
    const int64_t panel = id / PANEL, lane = id % PANEL, codes = 32 / w.bits;
    const uint32_t* words = static_cast<const uint32_t*>(w.data) + panel * (w.k / codes) * PANEL;
    const GroupScales scales(w, panel);
    int64_t k = 0;
    for (int64_t g = 0; g < w.k / w.group; g++) {
        const char* block = scales.scales + g / scales.in_block * scales.block;
        const char* group = block + scales.head + g % scales.in_block * scales.stride;
        const int64_t first = lane / LANES * LANES;
        Vec of_scale, of_least;
        scales.read(group, scales.shared(block, first), first, of_scale, of_least);
        const float scale = of_scale[lane % LANES], least = of_least[lane % LANES];
        for (const int64_t end = k + w.group; k < end; k++) {
            const uint32_t word = words[k / codes * PANEL + lane] >> (w.bits * (k % codes));
            out[k] = from_float<T>(mul_add(float(word & ((1u << w.bits) - 1)), scale, least));
        }
    }
}

// The experts of a mixture: y = sum over a token's choices of weight * down(act(gate, up)).
// In Python: `_Experts` in experts.py.
struct Experts {
    const Weight* const* gate_up;  // [E]: [2 I, H], gate rows first
    const Weight* const* down;     // [E]: [H, I]
    const void* x;                 // [T, H]
    const int32_t* experts;        // [T, choices]; ids from E on are computed elsewhere
    const float* weights;          // [T, choices]
    float* out;                    // [T, H]
    int64_t tokens, choices, num_experts;
    int32_t activation;  // `Activation`
    float alpha, limit;  // of CLAMPED
    int32_t bfloat16_tokens;
};

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, CLAMPED = 2 };

// (up + 1) * gate * sigmoid(alpha * gate), of clamped values.
inline Vec clamped_mul(Vec gate, Vec up, float alpha, float limit) {
    const Vec most = broadcast(limit), least = broadcast(-limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up < least ? least : up;
    return (up + 1.0f) * gate / (1.0f + exp_vec(gate * -alpha));
}

// A row's act(gate, up), in the type of the tokens.
template <class T>
void activate_row(const Experts& e, const float* gate, const float* up, int64_t size, T* out) {
    if (e.activation == SILU) return silu_mul_row(gate, up, size, out);
    const auto act = [&](Vec g, Vec u) {
        return e.activation == GELU_TANH ? gelu_tanh_vec(g) * u
                                         : clamped_mul(g, u, e.alpha, e.limit);
    };
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store_floats(out + i, act(load<Vec>(gate + i), load<Vec>(up + i)));
    for (; i < size; i++) out[i] = from_float<T>(act(broadcast(gate[i]), broadcast(up[i]))[0]);
}

// Pairs of a token and a choice, those of one expert next to each other.
struct Pairs {
    std::vector<int64_t> first;  // [E + 1]: of each expert
    std::vector<int64_t> pair;   // by place: token * choices + choice
    std::vector<int64_t> place;  // by pair; -1: computed elsewhere

    explicit Pairs(const Experts& e)
        : first(size_t(e.num_experts + 1)), pair(size_t(e.tokens * e.choices)),
          place(size_t(e.tokens * e.choices), -1) {
        const int64_t count = e.tokens * e.choices;
        for (int64_t p = 0; p < count; p++)
            if (e.experts[p] < e.num_experts) first[size_t(e.experts[p] + 1)]++;
        for (size_t i = 1; i < first.size(); i++) first[i] += first[i - 1];
        std::vector<int64_t> next(first.begin(), first.end() - 1);
        for (int64_t p = 0; p < count; p++)
            if (e.experts[p] < e.num_experts) {
                place[size_t(p)] = next[size_t(e.experts[p])]++;
                pair[size_t(place[size_t(p)])] = p;
            }
    }
    int64_t count() const { return first.back(); }
};

// `multiply` by a weight that has the values of the plain one.
template <class T, class Sink>
void multiply_as(const Weight& w, const Tokens& tokens, int64_t first, int64_t count,
                 int64_t begin, int64_t end, Sink& sink) {
    if constexpr (std::is_same_v<T, BFloat16>)
        multiply<BFLOAT16>(w, tokens, first, count, begin, end, 0, sink);
    else if (w.kind == WIDENED)
        multiply<WIDENED>(w, tokens, first, count, begin, end, 0, sink);
    else if (w.kind == HALVES)
        multiply<HALVES>(w, tokens, first, count, begin, end, 0, sink);
    else
        multiply<FLOAT32>(w, tokens, first, count, begin, end, 0, sink);
}

// The GEMM of every expert with the rows of its pairs, x [pairs, K]; sink(weight, part).
template <class T, class Sink>
void multiply_experts(const Weight* const* weights, const Pairs& pairs, const T* x, int threads,
                      Sink&& sink) {
    struct Item {
        const Weight* weight;
        int64_t first, count, begin, end;
    };
    std::vector<Item> items;
    for (size_t e = 0; e + 1 < pairs.first.size(); e++) {
        const Weight& w = *weights[e];
        const int64_t count = pairs.first[e + 1] - pairs.first[e];
        const int64_t blocks = (count + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
        const int64_t share = share_of(w, threads), panels = panels_of(w);
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t begin = 0; begin < panels; begin += share) {
                const int64_t from = count * b / blocks, to = count * (b + 1) / blocks;
                const int64_t end = std::min(begin + share, panels);
                items.push_back({&w, pairs.first[e] + from, to - from, begin, end});
            }
    }
    parallel_for(int64_t(items.size()), threads, [&](int64_t i) {
        const auto [w, first, count, begin, end] = items[size_t(i)];
        const Weight& weight = *w;
        const Tokens tokens = {x, weight.k, nullptr, nullptr, nullptr, 0};
        const auto each = [&](const Part& part) { sink(weight, part); };
        multiply_as<T>(weight, tokens, first, count, begin, end, each);
    });
}

constexpr int64_t EXPERT_TOKENS = 1024;  // at once, so that little memory is needed

template <class T>
void run_experts(const Experts& e, int threads) {
    const Pairs pairs(e);
    const int64_t count = pairs.count(), hidden = e.down[0]->n, width = e.down[0]->k;
    T* rows = scratch<T, 6>(count * std::max(hidden, width));
    const T* x = static_cast<const T*>(e.x);
    parallel_for(count, count >= 64 ? threads : 1, [&](int64_t i) {
        std::copy_n(x + pairs.pair[size_t(i)] / e.choices * hidden, hidden, rows + i * hidden);
    });
    float* gate_up = scratch<float, 7>(count * std::max(2 * width, hidden));
    multiply_experts<T>(e.gate_up, pairs, rows, threads, [&](const Weight& w, const Part& part) {
        for (int64_t t = 0; t < part.tokens; t++) {
            float* row = gate_up + (part.first_token + t) * w.n + part.first_column;
            each_output(
                w, part, t, [&](Vec v, int64_t i) { store(row + i, v); },
                [&](float v, int64_t i) { row[i] = v; });
        }
    });
    parallel_for(count, count >= 16 ? threads : 1, [&](int64_t i) {
        const float* gate = gate_up + 2 * i * width;
        activate_row(e, gate, gate + width, width, rows + i * width);
    });
    float* down = gate_up;  // weighted
    multiply_experts<T>(e.down, pairs, rows, threads, [&](const Weight& w, const Part& part) {
        for (int64_t t = 0; t < part.tokens; t++) {
            const int64_t at = part.first_token + t;
            const float weight = e.weights[pairs.pair[size_t(at)]];
            float* row = down + at * w.n + part.first_column;
            each_output(
                w, part, t, [&](Vec v, int64_t i) { store(row + i, v * weight); },
                [&](float v, int64_t i) { row[i] = v * weight; });
        }
    });
    parallel_for(e.tokens, e.tokens >= 16 ? threads : 1, [&](int64_t t) {
        float* out = e.out + t * hidden;
        std::fill_n(out, hidden, 0.0f);
        for (int64_t c = 0; c < e.choices; c++) {  // in their order
            const int64_t place = pairs.place[size_t(t * e.choices + c)];
            for (int64_t i = 0; i < hidden && place >= 0; i++) out[i] += down[place * hidden + i];
        }
    });
}

// A GEMM per head: out[t, h] = x[t, h] W_hᵀ. In Python: `_HeadGemm` in gemm.py.
struct HeadGemm {
    const Weight* const* weights;  // [heads]: [N, K] each
    const void* x;                 // [T, heads, K]
    void* out;                     // [T, heads, N]
    int64_t tokens, heads, x_token_stride, x_head_stride, out_token_stride, out_head_stride;
    int32_t bfloat16_tokens;
};

template <class T>
void head_gemm(const HeadGemm& g, int threads) {
    parallel_for(g.heads, threads, [&](int64_t h) {
        const Weight& w = *g.weights[h];
        const T* x = static_cast<const T*>(g.x) + h * g.x_head_stride;
        T* out = static_cast<T*>(g.out) + h * g.out_head_stride;
        const auto sink = [&](const Part& part) {
            for (int64_t t = 0; t < part.tokens; t++) {
                T* row = out + (part.first_token + t) * g.out_token_stride + part.first_column;
                each_output(
                    w, part, t, [&](Vec v, int64_t i) { store_floats(row + i, v); },
                    [&](float v, int64_t i) { row[i] = from_float<T>(v); });
            }
        };
        const Tokens tokens = {x, g.x_token_stride, nullptr, nullptr, nullptr, 0};
        multiply_as<T>(w, tokens, 0, g.tokens, 0, panels_of(w), sink);
    });
}

}  // namespace forerun

using namespace forerun;

#pragma GCC visibility push(default)
extern "C" {

void forerun_announce_gemm(const Weight* w) { next_gemm = w; }

int64_t forerun_panel() { return PANEL; }

// Asks for large pages: reading weights then misses the TLB less often.
void forerun_advise_huge_pages(void* data, int64_t bytes, int32_t) {
#if defined(__linux__)
    const uintptr_t page = 4096, begin = (uintptr_t(data) + page - 1) / page * page;
    const int64_t rest = bytes - int64_t(begin - uintptr_t(data));
    if (rest > 0) madvise(reinterpret_cast<void*>(begin), size_t(rest), MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

// W [n, k], float32 or bfloat16, into data and scales (zero at first).
void forerun_pack(const void* weight, int32_t is_bfloat16, int64_t n, int64_t k, int32_t kind,
                  void* data, void* scales, int32_t threads) {
    parallel_for((n + PANEL - 1) / PANEL, threads, [&](int64_t panel) {
        for (int64_t r = panel * PANEL; r < std::min((panel + 1) * PANEL, n); r++) {
            auto* to = static_cast<BFloat16*>(scales);
            if (is_bfloat16)
                pack_row(static_cast<const BFloat16*>(weight) + r * k, r, k, kind, data, to);
            else
                pack_row(static_cast<const float*>(weight) + r * k, r, k, kind, data, to);
        }
    });
}

// Rows ids[i] of a weight that is not int8, as the type of its tokens. Ids are within W.
void forerun_take_packed_rows(const Weight* w, const int64_t* ids, int64_t count, void* out,
                              int32_t) {
    for (int64_t i = 0; i < count; i++) {
        if (has_codes(w->kind)) {
            if (w->bfloat16_tokens)
                take_grouped_row(*w, ids[i], static_cast<BFloat16*>(out) + i * w->k);
            else
                take_grouped_row(*w, ids[i], static_cast<float*>(out) + i * w->k);
            continue;
        }
        const int64_t first = ids[i] / PANEL * w->k * PANEL, lane = ids[i] % PANEL;
        const auto* halves = static_cast<const BFloat16*>(w->data) + first;
        for (int64_t k = 0; k < w->k; k++) {
            const int64_t at = i * w->k + k, pair = (k / 2 * PANEL + lane) * 2 + k % 2;
            if (w->kind == BFLOAT16)
                static_cast<BFloat16*>(out)[at] = halves[pair];
            else if (w->kind == HALVES)
                static_cast<float*>(out)[at] = float_of(
                    static_cast<const Float16*>(w->data) + first + k * PANEL, lane);
            else
                static_cast<float*>(out)[at] =
                    w->kind == WIDENED
                        ? to_float(halves[pair])
                        : static_cast<const float*>(w->data)[first + k * PANEL + lane];
        }
    }
}

void forerun_gemm(const Weight* w, const void* x, int64_t m, void* out,
                  int32_t threads) {
    (w->bfloat16_tokens ? gemm_plain<BFloat16> : gemm_plain<float>)(*w, x, m, out, threads);
}

void forerun_gemm_add_norm(const Weight* w, const void* x, int64_t m,
                           const void* residual, const void* norm_weight, float eps, void* total,
                           void* normed, int32_t threads) {
    const AddNorm add = {residual, norm_weight, total, normed, eps};
    (w->bfloat16_tokens ? gemm_add_norm<BFloat16> : gemm_add_norm<float>)(*w, x, m, add,
                                                                          threads);
}

void forerun_gemm_silu_mul(const Weight* w, const void* x, int64_t m, void* out,
                           int32_t threads) {
    (w->bfloat16_tokens ? gemm_silu_mul<BFloat16> : gemm_silu_mul<float>)(*w, x, m, out,
                                                                          threads);
}

void forerun_gemm_argmax(const Weight* w, const void* x, int64_t m, int64_t* ids,
                         int32_t threads) {
    (w->bfloat16_tokens ? gemm_argmax<BFloat16> : gemm_argmax<float>)(*w, x, m, ids,
                                                                      threads);
}

void forerun_head_gemm(const HeadGemm* g, int32_t threads) {
    (g->bfloat16_tokens ? head_gemm<BFloat16> : head_gemm<float>)(*g, threads);
}

void forerun_experts(const Experts* e, int32_t threads) {
    const int64_t hidden = e->down[0]->n, row = hidden * (e->bfloat16_tokens ? 2 : 4);
    for (int64_t first = 0; first < e->tokens; first += EXPERT_TOKENS) {
        Experts part = *e;
        part.tokens = std::min(EXPERT_TOKENS, e->tokens - first);
        part.x = static_cast<const char*>(e->x) + first * row;
        part.experts += first * e->choices, part.weights += first * e->choices;
        part.out += first * hidden;
        (e->bfloat16_tokens ? run_experts<BFloat16> : run_experts<float>)(part, threads);
    }
}

}  // extern "C"
#pragma GCC visibility pop
