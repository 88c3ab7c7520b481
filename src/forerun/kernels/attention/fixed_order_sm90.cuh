// What kernels for Hopper share that have the bits of `fixed_order.py`: bounds of segments, the softmax
// of a segment, the fold of segments. Every product, sum and exponential is written as one instruction:
// those of Triton's kernel, in its order. A thread has two rows of a tile, and of each accumulator the
// columns of the first at [4 j] and [4 j + 1], those of the second at + 2.
#pragma once

#include "sm90.cuh"

constexpr int SEGMENT_BLOCK = 64;  // positions that a step of the softmax takes

// --- segments: as in fixed_order.py --------------------------------------------------------------

__device__ inline int segment_begin(int segment) {
  if (segment < 32) return segment * 128;
  return segment < 44 ? 4096 + (segment - 32) * 1024 : 16384 + (segment - 44) * 4096;
}

__device__ inline int segment_of(int position) {
  if (position < 4096) return position / 128;
  return position < 16384 ? 32 + (position - 4096) / 1024 : 44 + (position - 16384) / 4096;
}

// Whether a block's first position begins a segment.
__device__ inline bool begins_segment(int position) {
  return position == segment_begin(segment_of(position));
}

// --- softmax and fold ----------------------------------------------------------------------------

// What weighted values are divided by.
__device__ inline float divisor(float sum) { return sum == 0.f ? 1.f : sum; }

// The softmax of a segment, over its blocks in their order.
struct Softmax {
  float max[2] = {-1e38f, -1e38f}, sum[2] = {0.f, 0.f};  // of a thread's two rows, max in powers of two

  // s: scores -> weights. factor: what the weights of earlier blocks are multiplied by.
  __device__ void step(float (&s)[SEGMENT_BLOCK / 2], float qk_scale, float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float row_max = fmaxf(max[half], __fmul_rn(largest_of_row(s, half), qk_scale));
      float total = 0.f;
      factor[half] = exp2_approx(__fsub_rn(max[half], row_max));
      max[half] = row_max;
#pragma unroll
      for (int j = 0; j < SEGMENT_BLOCK / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[4 * j + 2 * half + e];
          x = exp2_approx(__fmaf_rn(x, qk_scale, -row_max));
          total = j + e == 0 ? x : __fadd_rn(total, x);
        }
      total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 2));
      total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 1));
      sum[half] = __fmaf_rn(sum[half], factor[half], total);
    }
  }

  __device__ float4 maxima_sums() const { return make_float4(max[0], max[1], sum[0], sum[1]); }

  // What makes outputs of a row's weighted values.
  __device__ float normalizer(int half) const { return divisor(sum[half]); }
  __device__ static float normalized(float x, float sum) { return divide(x, sum); }
};

template <int COUNT>
__device__ void rescale(float (&o)[COUNT], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) o[i] = __fmul_rn(o[i], factor[i / 2 % 2]);
}

// Weighted values, or a sum of weights, after a segment; old, own: what both are rescaled by.
__device__ inline float folded(float total, float old, float more, float own) {
  return __fmaf_rn(total, old, __fmul_rn(more, own));
}

// The fold of the segments so far, of COUNT of a thread's values.
template <int COUNT>
struct Total {
  Softmax softmax;
  float o[COUNT];

  __device__ Total() {
#pragma unroll
    for (int i = 0; i < COUNT; i++) o[i] = 0.f;
  }

  // Adds a segment: its maxima and sums, and its output, 16 bytes for each j.
  template <typename Output>
  __device__ void fold(float4 maxima_sums, Output output) {
    const float max[2] = {maxima_sums.x, maxima_sums.y}, sum[2] = {maxima_sums.z, maxima_sums.w};
    float old[2], own[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float& so_far = softmax.max[half];
      float row_max = fmaxf(so_far, max[half]);
      old[half] = exp2_approx(__fsub_rn(so_far, row_max));
      own[half] = exp2_approx(__fsub_rn(max[half], row_max));
      so_far = row_max;
      float& weights = softmax.sum[half];
      weights = folded(weights, old[half], sum[half], own[half]);
    }
#pragma unroll
    for (int j = 0; j < COUNT / 4; j++) {
      float4 x = output(j);
      o[4 * j] = folded(o[4 * j], old[0], x.x, own[0]);
      o[4 * j + 1] = folded(o[4 * j + 1], old[0], x.y, own[0]);
      o[4 * j + 2] = folded(o[4 * j + 2], old[1], x.z, own[1]);
      o[4 * j + 3] = folded(o[4 * j + 3], old[1], x.w, own[1]);
    }
  }
};
