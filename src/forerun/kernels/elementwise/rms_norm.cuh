// Residual addition and RMSNorm of few tokens on Hopper: a warp per slice of the columns, with exactly the
// arithmetic of the Triton kernel (rms_norm.py), which serves more tokens. Macros: HIDDEN, and NORM_PARTS,
// the partials whose sum is added to the residual.
#pragma once

#include "sm90.cuh"

constexpr int NORM_SLICE = 8 * 32, NORM_SLICES = HIDDEN / NORM_SLICE;  // a warp's columns; warps
static_assert(HIDDEN % NORM_SLICE == 0, "a lane has 8 columns");
static_assert(NORM_SLICES == 8 || NORM_SLICES == 16, "as many warps as the Triton kernel has");

// A token's 8 columns of this lane, in bf16: residual + the sum of its parts.
__device__ inline uint4 add_parts(const float* parts, const u16* residual, int T) {
  uint4 before = *(const uint4*)residual;
  float4 a = *(const float4*)parts, b = *(const float4*)(parts + 4);
#pragma unroll
  for (int i = 1; i < NORM_PARTS; i++) {
    float4 c = *(const float4*)(parts + i * T * HIDDEN);
    float4 d = *(const float4*)(parts + i * T * HIDDEN + 4);
    a.x += c.x, a.y += c.y, a.z += c.z, a.w += c.w;
    b.x += d.x, b.y += d.y, b.z += d.z, b.w += d.w;
  }
  return make_uint4(pack_bf16x2(a.x + low(before.x), a.y + high(before.x)),
                    pack_bf16x2(a.z + low(before.y), a.w + high(before.y)),
                    pack_bf16x2(b.x + low(before.z), b.y + high(before.z)),
                    pack_bf16x2(b.z + low(before.w), b.w + high(before.w)));
}

// The sum of squares of 8 values, added up as Triton's RMSNorm kernel does it, which serves more
// tokens: here, over the lanes (`warp_sum`), and over the warps (`sum_of_warps`).
__device__ inline float sum_of_squares(uint4 x) {
  float sum = low(x.x) * low(x.x);
  sum = __fmaf_rn(high(x.x), high(x.x), sum);
  sum = __fmaf_rn(low(x.y), low(x.y), sum);
  sum = __fmaf_rn(high(x.y), high(x.y), sum);
  sum = __fmaf_rn(low(x.z), low(x.z), sum);
  sum = __fmaf_rn(high(x.z), high(x.z), sum);
  sum = __fmaf_rn(low(x.w), low(x.w), sum);
  return __fmaf_rn(high(x.w), high(x.w), sum);
}

// Of COUNT sums, STRIDE apart, from `first` on.
template <int COUNT = NORM_SLICES, int STRIDE = 1>
__device__ float sum_of_warps(const float (&sums)[NORM_SLICES], int first = 0) {
  if constexpr (COUNT == 1)
    return sums[first];
  else
    return sum_of_warps<COUNT / 2, 2 * STRIDE>(sums, first) +
           sum_of_warps<COUNT / 2, 2 * STRIDE>(sums, first + STRIDE);
}

__device__ inline u32 scale(u32 x, float inv_rms, u32 weight) {
  return pack_bf16x2(low(x) * inv_rms * low(weight), high(x) * inv_rms * high(weight));
}
