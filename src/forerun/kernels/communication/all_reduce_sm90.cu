// The sum over tensor-parallel ranks of few tokens, with the residual addition and the RMSNorm after it: a CTA
// per token, 8 columns per thread. all_reduce_sm90.py explains the design, compiles and launches it, and puts
// its configuration in front of this file, as macros.

#ifndef HIDDEN  // opened in an IDE: one consistent configuration
#define HIDDEN 4096
#define RANKS 2
#define RANK 0  // this one
#define PARTS 4       // of this rank's own sum
#define PARTS_FLOAT 1  // they are float32; 0: bfloat16
#define NORM 1         // 0: the sum alone
#define ROW_BYTES 32768  // of a token in the buffers: lines of up to 8192 columns
#define RANK_BYTES 2097152  // of one rank in another one's buffer: 64 tokens
#endif

#include "peers_sm90.cuh"
#include "sm90.cuh"

constexpr int THREADS = HIDDEN / 8, WARPS = THREADS / 32;
static_assert(HIDDEN % 256 == 0 && THREADS <= 1024, "whole warps, one CTA");

// 8 columns of another rank, which may not have come so far. Traps after `seconds`.
__device__ inline uint4 wait_for(u64 line, u32 call, int seconds) {
  uint4 x;
  Deadline deadline(seconds);
  while (!pull(line, x.x, x.y, call) || !pull(line + 16 * THREADS, x.z, x.w, call)) deadline.check();
  return x;
}

// This rank's own 8 columns: the sum of its parts.
__device__ inline uint4 own_sum(const void* parts, int at, int T) {
#if PARTS_FLOAT
  const float* p = (const float*)parts + at;
  float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
#pragma unroll
  for (int i = 1; i < PARTS; i++) {
    float4 c = *(const float4*)(p + (long long)i * T * HIDDEN);
    float4 d = *(const float4*)(p + (long long)i * T * HIDDEN + 4);
    a.x += c.x, a.y += c.y, a.z += c.z, a.w += c.w;
    b.x += d.x, b.y += d.y, b.z += d.z, b.w += d.w;
  }
#else
  const u16* p = (const u16*)parts + at;
  uint4 x = *(const uint4*)p;
  if (PARTS == 1) return x;
  float4 a = make_float4(low(x.x), high(x.x), low(x.y), high(x.y));
  float4 b = make_float4(low(x.z), high(x.z), low(x.w), high(x.w));
#pragma unroll
  for (int i = 1; i < PARTS; i++) {
    uint4 y = *(const uint4*)(p + (long long)i * T * HIDDEN);
    a.x += low(y.x), a.y += high(y.x), a.z += low(y.y), a.w += high(y.y);
    b.x += low(y.z), b.y += high(y.z), b.z += low(y.w), b.w += high(y.w);
  }
#endif
  return make_uint4(pack_bf16x2(a.x, a.y), pack_bf16x2(a.z, a.w), pack_bf16x2(b.x, b.y), pack_bf16x2(b.z, b.w));
}

struct Sum {
  float x[8];
  __device__ void add(uint4 y) {
    x[0] += low(y.x), x[1] += high(y.x), x[2] += low(y.y), x[3] += high(y.y);
    x[4] += low(y.z), x[5] += high(y.z), x[6] += low(y.w), x[7] += high(y.w);
  }
  __device__ uint4 rounded() const {
    return make_uint4(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]), pack_bf16x2(x[4], x[5]),
                      pack_bf16x2(x[6], x[7]));
  }
};

__device__ inline u32 scale(u32 x, float inv_rms, u32 weight) {
  return pack_bf16x2(low(x) * inv_rms * low(weight), high(x) * inv_rms * high(weight));
}

// total [T, H] = residual + the sum over ranks of the sum of parts [PARTS, T, H]; out = its RMSNorm. Without
// NORM: total = that sum. buffers: the address of every rank's buffer, [2, RANKS, tokens] rows of lines,
// of which a rank writes those of its own number. state: the number of the last call, and CTAs that are done.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
all_reduce_sm90_kernel(const void* parts, const u16* residual, const u16* norm_weight, u16* total, u16* out,
                       const u64* buffers, u32* state, int T, int seconds, float eps) {
  griddepcontrol_launch_dependents();
  int token = blockIdx.x, thread = threadIdx.x, first = thread * 8, at = token * HIDDEN + first;
  uint4 w = NORM ? load_constant(norm_weight + first) : make_uint4(0, 0, 0, 0);
  u64 buffer[RANKS];
#pragma unroll
  for (int i = 0; i < RANKS; i++) buffer[i] = buffers[i];
  griddepcontrol_wait();

  u32 call = *(volatile u32*)state + 1;
  uint4 own = own_sum(parts, at, T);
  u64 half = (u64)(call % 2) * RANKS * RANK_BYTES;
  u64 offset = half + (u64)token * ROW_BYTES + thread * 16, of_rank = RANK_BYTES;
#pragma unroll
  for (int i = 1; i < RANKS; i++) {
    u64 line = buffer[(RANK + i) % RANKS] + offset + RANK * of_rank;
    push(line, own.x, own.y, call);
    push(line + 16 * THREADS, own.z, own.w, call);
  }
  uint4 before = NORM ? *(const uint4*)(residual + at) : make_uint4(0, 0, 0, 0);
  Sum sum = {};
#pragma unroll
  for (int i = 0; i < RANKS; i++)  // in the order of the ranks, so that all have the same bits
    sum.add(i == RANK ? own : wait_for(buffer[RANK] + offset + i * of_rank, call, seconds));
  uint4 result = sum.rounded();
#if NORM
  Sum with_residual = {};
  with_residual.add(result);
  with_residual.add(before);
  result = with_residual.rounded();
#endif
  *(uint4*)(total + at) = result;
#if NORM
  Sum rounded = {};
  rounded.add(result);
  float mine = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) mine = __fmaf_rn(rounded.x[i], rounded.x[i], mine);
  mine = warp_sum(mine);
  __shared__ float squares[32];
  if (thread % 32 == 0) squares[thread / 32] = mine;
  __syncthreads();
  float all = warp_sum(thread % 32 < WARPS ? squares[thread % 32] : 0.f);
  float inv_rms = rsqrtf(all / HIDDEN + eps);
  *(uint4*)(out + at) = make_uint4(scale(result.x, inv_rms, w.x), scale(result.y, inv_rms, w.y),
                                   scale(result.z, inv_rms, w.z), scale(result.w, inv_rms, w.w));
#else
  __syncthreads();  // all threads have read the number of the call
#endif
  if (thread == 0) end_call(state, call);
}
