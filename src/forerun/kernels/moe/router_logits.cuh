// Logits of a mixture of experts' router by mma.sync: a warp multiplies 16 tokens by tiles of 8
// experts over a slice of the columns. For the router's kernel and, with few tokens, for one that
// stores the logits. Macros: HIDDEN, NUM_EXPERTS, SLICE, TILES_PER_WARP; router_sm90.cu explains them.
#pragma once

#include "sm90.cuh"
#include "top_k.cuh"

constexpr int WARPS = 8;
constexpr int TOKENS_MMA = 16, EXPERTS_MMA = 8;           // of mma.sync: M and N
constexpr int CHUNK = 32, CHUNKS = SLICE / CHUNK;         // columns of two mma.sync
constexpr int CHUNKS_IN_FLIGHT = TILES_PER_WARP * CHUNKS > 16 ? 4 : 8;  // loads of x at a time
constexpr int SLICES = (HIDDEN + SLICE - 1) / SLICE;
constexpr int EXPERT_TILES = (NUM_EXPERTS + EXPERTS_MMA - 1) / EXPERTS_MMA;
constexpr int ROW = EXPERT_TILES * EXPERTS_MMA;           // floats of a token's logits

// acc += 16 tokens by 8 experts, 16 columns deep. A thread holds columns (2 i, 2 i + 1) and
// (2 i + 8, 2 i + 9), i = lane % 4, of token lane / 4 (a0, a2) and lane / 4 + 8 (a1, a3) and of
// expert lane / 4 (b0, b1); in acc, experts 2 i and 2 i + 1 of both tokens.
__device__ inline void mma(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The first column of a thread's 8 in chunk 0 of a slice. Of these 8, mma.sync takes 4 at a time as
// those that belong to its thread; which ones does not matter, as x and the weight agree.
__device__ inline int first_column(int slice, int lane) { return slice * SLICE + lane % 4 * 8; }
// There are as many slices as warps or CTAs, 8, also where fewer hold all columns.
__device__ inline bool is_column(int column) { return HIDDEN == WARPS * SLICE || column < HIDDEN; }

// A warp's part of the weight's slice: thread (lane) holds expert lane / 4 of each tile.
struct WeightFragments {
  uint4 vectors[TILES_PER_WARP][CHUNKS];
  __device__ WeightFragments(const u16* weight, int slice, int warp, int lane) {
    int column = first_column(slice, lane);
#pragma unroll
    for (int tile = 0; tile < TILES_PER_WARP; tile++) {
      int expert = (tile * WARPS + warp) * EXPERTS_MMA + lane / 4;
      const u16* row = weight + expert * HIDDEN + column;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        vectors[tile][chunk] = make_uint4(0, 0, 0, 0);
        if (is_expert(expert) && is_column(column + chunk * CHUNK))
          vectors[tile][chunk] = load_constant(row + chunk * CHUNK);
      }
    }
  }
};

// 8 columns of a token if `valid`, or zeros. volatile: as many loads at a time as `multiply` says, in
// the order of mma().
__device__ inline uint4 load_x(const u16* p, bool valid) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.s32 p, %5, 0;\n"
      "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((int)valid));
  return v;
}

// A thread's columns of tokens lane / 4 and, in half 1, lane / 4 + 8. Few tokens are one tile, in
// global memory.
struct GlobalX {
  const u16* row;
  int column, token, T;
  __device__ GlobalX(const u16* x, int T, int slice, int lane)
      : column(first_column(slice, lane)), token(lane / 4), T(T) {
    row = x + token * HIDDEN + column;
  }
  __device__ uint4 load(int half, int offset) const {
    return load_x(row + 8 * half * HIDDEN + offset,
                  token + 8 * half < T && is_column(column + offset));
  }
};

// x in a register of its own. mma.sync needs its operands in adjacent ones; without this, ptxas moves
// them there for each mma.sync anew.
__device__ inline u32 copy(u32 x) {
  u32 y;
  asm volatile("prmt.b32 %0, %1, 0, 0x3210;" : "=r"(y) : "r"(x));
  return y;
}

// acc = partials of a slice for 16 tokens and the warp's experts. Even and odd steps are added up
// apart, so that one mma.sync need not wait for the other.
template <class X>
__device__ void multiply(float (&acc)[TILES_PER_WARP][4], const WeightFragments& weight,
                         const X& tile_x) {
  float odd[TILES_PER_WARP][4];
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * 4; i++) acc[i / 4][i % 4] = odd[i / 4][i % 4] = 0.f;
#pragma unroll
  for (int first = 0; first < CHUNKS; first += CHUNKS_IN_FLIGHT) {
    uint4 x[CHUNKS_IN_FLIGHT], x8[CHUNKS_IN_FLIGHT];  // of the token, and the 8th after it
#pragma unroll
    for (int i = 0; i < CHUNKS_IN_FLIGHT; i++) {
      if (first + i >= CHUNKS) break;
      x[i] = tile_x.load(0, (first + i) * CHUNK);
      x8[i] = tile_x.load(1, (first + i) * CHUNK);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS_IN_FLIGHT; i++) {
      if (first + i >= CHUNKS) break;
      u32 a[4] = {copy(x[i].x), copy(x8[i].x), copy(x[i].y), copy(x8[i].y)};
      u32 b[4] = {copy(x[i].z), copy(x8[i].z), copy(x[i].w), copy(x8[i].w)};
#pragma unroll
      for (int tile = 0; tile < TILES_PER_WARP; tile++) {
        uint4 w = weight.vectors[tile][first + i];
        mma(acc[tile], a[0], a[1], a[2], a[3], w.x, w.y);
        mma(odd[tile], b[0], b[1], b[2], b[3], w.z, w.w);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * 4; i++) acc[i / 4][i % 4] += odd[i / 4][i % 4];
}
