// What attention kernels for Hopper share that have a page of 64 positions as their block: shared memory
// of STAGES blocks, and products of up to 64 query rows with K, and of weights with V, for heads of 128
// in bfloat16.
#pragma once

#include "sm90.cuh"

constexpr int HEAD_DIM = 128, TILE_ROWS = 64, BLOCK_N = 64;
// A tile of [64, 128] in shared memory is two of [64, 64] with 128-byte swizzle.
constexpr int PARTS = HEAD_DIM / 64, PART_BYTES = 64 * 128, TILE_BYTES = PARTS * PART_BYTES;

// Shared-memory addresses: Q, stages of K and of V, mbarriers that a tile has arrived at. A warpgroup
// has every other stage to itself: it requests a tile when it has read the one before.
struct Smem {
  u32 data, barriers;
  __device__ u32 q() const { return data; }
  __device__ u32 k(int stage) const { return data + (1 + 2 * stage) * TILE_BYTES; }
  __device__ u32 v(int stage) const { return data + (2 + 2 * stage) * TILE_BYTES; }
  __device__ u32 k_full(int stage) const { return barriers + 16 * stage; }
  __device__ u32 v_full(int stage) const { return barriers + 16 * stage + 8; }
  __device__ u32 q_full() const { return barriers + 16 * STAGES; }
};

__device__ inline void init_barriers(const Smem& smem) {
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_init(smem.k_full(stage), 1);
    mbarrier_init(smem.v_full(stage), 1);
  }
  mbarrier_init(smem.q_full(), 1);
  mbarrier_init_fence();
}

// Requests both parts of a tile; `full` is its mbarrier.
__device__ inline void load_tile(u32 tile, const TmaDescriptor& descriptor, int column, int row,
                                 int depth, u32 full, u64 policy) {
  mbarrier_arrive_expect_tx(full, TILE_BYTES);
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    tma_load(tile + part * PART_BYTES, descriptor, column + part * 64, row, depth, full, policy);
}

// A thread of a warpgroup has two rows of the tile: tile_row() and tile_row() + 8. Of scores and
// output it has the columns 8 j + 2 (lane % 4) and the next, at [4 j] and [4 j + 1], and of the second
// row at + 2.
__device__ inline int tile_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// s (+)= 64 rows of q times 64 rows of K, 16 deep.
template <int ACCUMULATE>
__device__ void wgmma_scores(float (&s)[32], u64 q, u64 k) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_REGISTERS_32
               "}, %32, %33, %34, 1, 1, 0, 0;"
               : WGMMA_OPERANDS_32(s) : "l"(q), "l"(k), "n"(ACCUMULATE));
}

// o += 64 rows of weights, of which a thread has `p[0..3]`, times 128 columns of V, 16 deep.
__device__ inline void wgmma_values(float (&o)[64], const u32* p, u64 v) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_REGISTERS_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : WGMMA_OPERANDS_64(o) : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

// s = q times K; both are addresses of tiles.
__device__ inline void start_scores(float (&s)[32], u32 q_tile, u32 k_tile) {
  u64 q = k_major_descriptor(q_tile), k = k_major_descriptor(k_tile);
  wgmma_fence();
  wgmma_scores<0>(s, q, k);
#pragma unroll
  for (int i = 1; i < HEAD_DIM / 16; i++) {
    u64 step = i / 4 * (PART_BYTES >> 4) + i % 4 * 2;
    wgmma_scores<1>(s, q + step, k + step);
  }
  wgmma_commit();
}

// o += weights times V. The accumulator layout of S is the register layout of A.
__device__ inline void start_values(float (&o)[64], const float (&s)[32], u32 v_tile) {
  u64 v = mn_major_descriptor(v_tile, PART_BYTES);
  u32 p[16];
#pragma unroll
  for (int i = 0; i < 16; i++) p[i] = pack_bf16x2(s[2 * i], s[2 * i + 1]);
  fence_registers(o);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; i++) wgmma_values(o, p + 4 * i, v + 128 * i);
  wgmma_commit();
}
