// Absorbed MLA attention for Hopper (sm_90a): 64 query rows (tokens times heads) against a request's
// latent rows, [512 latent | 64 rope] bfloat16, of which a page holds a block of 64 positions.
// mla_sm90.py explains the design, compiles and launches it.
//
// mla_sm90.py puts a macro in front of this file:
//   CLUSTER_SIZE  CTAs (row tiles of one request) that share latent blocks by multicast: 1 or 2

#ifndef CLUSTER_SIZE  // opened in an IDE
#define CLUSTER_SIZE 2
#endif

#include "sm90.cuh"

constexpr int TILE_ROWS = 64, BLOCK_N = 64;  // query rows of a CTA, positions of a block
constexpr int CHUNKS = 9;                    // of 64 values: 128 bytes, the width of the swizzle
constexpr int ROPE_CHUNK = 8;
constexpr int LATENT = 64 * ROPE_CHUNK, HALF = LATENT / 2;  // HALF: output columns of a warpgroup
constexpr int PART = 128;                                   // values of a partial result's "head"
constexpr int CHUNK_BYTES = 64 * 128, BLOCK_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int CONSUMER_THREADS = 256;
constexpr int UNLIMITED = 0x7fffffff;  // window

// Named barriers; 0 is __syncthreads.
constexpr int MAX0_READY = 1, P1_READY = 2, P0_READY = 3, SUMS_READY = 4;

struct Arguments {
  void* out;              // [T, H, 512] bf16, or partial results [T, H, 4, splits, 128] float
  float* lse;             // [T, H, 4, splits], log2
  const int* page_table;  // [B, page_table_stride]
  const int* start;       // [B]: position of each request's first query token
  const int4* tile_map;   // ragged chunks: (request, first row of it, its rows, first of the tiles)
  const u64* tree;        // [B * q_len] or null: bit j: the token attends to token j
  float qk_scale;         // of the scores, times log2(e)
  int heads, q_len, causal, window, page_table_stride, row_tiles, num_splits;
};

// --- work of a CTA -------------------------------------------------------------------------------

// A tile of a request's rows and a split of its positions. All CTAs of a cluster have the same
// blocks: `pair` and `num_pairs` are of blocks of 64 positions, two of which are one iteration.
struct Work {
  int request, split, rows;        // rows of the request
  int first_row;                   // of the tile, within the request
  u64 request_row;                 // of the request's first row in q and out
  int start, end;                  // positions of the query tokens
  int clear, full;                 // positions in [clear, full) are attended to by all rows
  int last_block, block, num_pairs;
};

__device__ Work find_work(const Arguments& args, int cta_rank) {
  Work work;
  if (args.tile_map) {
    int4 entry = args.tile_map[blockIdx.x / CLUSTER_SIZE];
    work.request = entry.x;
    work.request_row = entry.y;
    work.rows = entry.z;
    work.first_row = entry.w + cta_rank * TILE_ROWS;
    work.split = 0;
  } else {
    int i = blockIdx.x / args.row_tiles;
    work.first_row = blockIdx.x % args.row_tiles * TILE_ROWS;
    work.split = i % args.num_splits;
    work.request = i / args.num_splits;
    work.rows = args.heads * args.q_len;
    work.request_row = (u64)work.request * work.rows;
  }
  work.start = args.start[work.request];
  work.end = work.start + work.rows / args.heads;
  int first = work.first_row - cta_rank * TILE_ROWS;  // of the cluster
  int last = min(first + CLUSTER_SIZE * TILE_ROWS, work.rows) - 1;
  int first_token = first / args.heads, last_token = last / args.heads;
  // Positions [low, limit) are attended to by some row.
  int low = 0, limit = work.end;
  work.clear = 0;
  work.full = args.tree ? work.start : work.end;
  if (args.causal) {
    limit = work.start + last_token + 1;
    work.full = work.start + first_token + 1;
  }
  if (args.window != UNLIMITED) {
    low = work.start - args.window + (args.causal ? first_token + 1 : 0);
    work.clear = work.start - args.window + (args.causal ? last_token + 1 : 0);
  }
  low = max(low, 0);
  int base = low / BLOCK_N;
  work.last_block = (limit - 1) / BLOCK_N;
  int pairs = (work.last_block - base + 2) / 2;
  int begin = pairs * work.split / args.num_splits;
  work.block = base + 2 * begin;
  work.num_pairs = pairs * (work.split + 1) / args.num_splits - begin;
  return work;
}

// The position of a block's first row in shared memory. K/V past `end` may be NaN, so a request's
// last block is moved back to end there; TMA fills rows before the page with zeros.
__device__ int block_origin(const Work& work, int block) {
  return min(block * BLOCK_N, work.end - BLOCK_N);
}

// Shared-memory addresses: q and two blocks in chunks of [64, 64] with 128-byte swizzle, row maxima
// and sums of both warpgroups, mbarriers. `full`: a chunk has arrived. `empty`: a half of a block's
// chunks has been read: 0: chunks 0 to 3, which warpgroup 0 multiplies, 1: chunks 4 to 7.
// The rope chunk is released with the half that is read last.
struct Smem {
  u32 data;
  float* rows;
  u32 barriers;
  __device__ u32 q(int chunk) const { return data + chunk * CHUNK_BYTES; }
  __device__ u32 block(int buffer, int chunk) const {
    return data + (1 + buffer) * BLOCK_BYTES + chunk * CHUNK_BYTES;
  }
  __device__ float* row_max(int warpgroup) const { return rows + 64 * warpgroup; }
  __device__ float* row_sum(int warpgroup) const { return rows + 128 + 64 * warpgroup; }
  __device__ u32 full(int buffer, int chunk) const {
    return barriers + 8 * (CHUNKS * buffer + chunk);
  }
  __device__ u32 q_full(int chunk) const { return full(2, chunk); }
  __device__ u32 empty(int buffer, int half) const {
    return barriers + 8 * (3 * CHUNKS + 2 * buffer + half);
  }
};

// --- producer ------------------------------------------------------------------------------------

struct Producer {
  const TmaDescriptor& q_descriptor;
  const TmaDescriptor& pool_descriptor;
  const Smem& smem;
  const Work& work;
  const int* table;  // of the request
  int cta_rank;

  __device__ int page(int block) const { return table[min(block, work.last_block)]; }

  // Chunks [begin, end) of a block, and the rope chunk if `rope`. A block past the last one is the
  // last one again: its positions are masked, but must not be NaN.
  __device__ void load_chunks(int buffer, int begin, int end, bool rope, int block, int page,
                              int phase) const {
    int loaded = min(block, work.last_block);
    int row = block_origin(work, loaded) - loaded * BLOCK_N;
    mbarrier_wait(smem.empty(buffer, begin / 4), phase ^ 1);
    for (int chunk = begin; chunk < end; chunk++) load_chunk(buffer, chunk, row, page);
    if (rope) load_chunk(buffer, ROPE_CHUNK, row, page);
  }

  // The CTAs of a cluster take turns.
  __device__ void load_chunk(int buffer, int chunk, int row, int page) const {
    u32 full = smem.full(buffer, chunk);
    mbarrier_arrive_expect_tx(full, CHUNK_BYTES);
    if ((chunk + buffer) % CLUSTER_SIZE == cta_rank)
      tma_load<CLUSTER_SIZE>(smem.block(buffer, chunk), pool_descriptor, chunk * 64, row, page,
                             full, EVICT_NORMAL);
  }

  // In the order in which the parts become free.
  __device__ void load_pair(int i, int page0, int page1) const {
    int block = work.block + 2 * i, phase = i & 1;
    load_chunks(0, 0, 4, false, block, page0, phase);
    load_chunks(1, 4, 8, false, block + 1, page1, phase);
    load_chunks(0, 4, 8, true, block, page0, phase);
    load_chunks(1, 0, 4, true, block + 1, page1, phase);
  }

  __device__ void load_q() const {
    int row = (int)(work.request_row + work.first_row);
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      mbarrier_arrive_expect_tx(smem.q_full(chunk), CHUNK_BYTES);
      tma_load(smem.q(chunk), q_descriptor, chunk * 64, row, smem.q_full(chunk), EVICT_NORMAL);
    }
  }

  // With PDL, K/V before `start` was written before the preceding kernel.
  __device__ void run(bool ragged) const {
    if (work.num_pairs == 0) return;  // no consumer waits for q
    int page0 = page(work.block), page1 = page(work.block + 1), i = 0;
    bool early = !ragged && (work.block + 2) * BLOCK_N <= work.start;
    if (!early) {
      griddepcontrol_wait();
      load_q();
    }
    for (; i < work.num_pairs; i++) {
      int next0 = page(work.block + 2 * i + 2), next1 = page(work.block + 2 * i + 3);
      load_pair(i, page0, page1);
      page0 = next0;
      page1 = next1;
      if (early && i == 0) {
        griddepcontrol_wait();
        load_q();
      }
    }
    if (CLUSTER_SIZE > 1) wait_for_releases(i & 1);
  }

  // No CTA exits while the other may still arrive at its barriers: it waits until both have released
  // every buffer for the last time.
  __device__ void wait_for_releases(int phase) const {
    for (int i = 0; i < 4; i++) mbarrier_wait(smem.empty(i / 2, i % 2), phase ^ 1);
  }
};

// --- wgmma ---------------------------------------------------------------------------------------

// s (+)= 64 rows of q times 64 latent rows, 16 deep.
template <int ACCUMULATE>
__device__ void wgmma_scores(float (&s)[32], u64 q, u64 k) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_REGISTERS_32
               "}, %32, %33, %34, 1, 1, 0, 0;"
               : WGMMA_OPERANDS_32(s) : "l"(q), "l"(k), "n"(ACCUMULATE));
}

// o += 64 rows of weights, in registers or shared memory, times 256 latent columns, 16 deep.
__device__ void wgmma_values(float (&o)[128], const u32* p, u64 v) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_REGISTERS_128
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
               : WGMMA_OPERANDS_128(o) : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

__device__ void wgmma_values(float (&o)[128], u64 p, u64 v) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_REGISTERS_128
               "}, %128, %129, 1, 1, 1, 0, 1;"
               : WGMMA_OPERANDS_128(o) : "l"(p), "l"(v));
}

// --- consumer warpgroups -------------------------------------------------------------------------

// A thread has two rows of the tile: row() and row() + 8. Of scores and output it has the columns
// 8 j + 2 (lane % 4) and the next, at [4 j] and [4 j + 1], and of the second row at + 2.
__device__ int tile_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// Both warpgroups keep the same maxima, and the sums of the weights of their own blocks; `sum` is
// of this thread's columns.
struct Softmax {
  float max[2] = {-1e38f, -1e38f}, sum[2] = {0.f, 0.f};
  // What the mask needs: positions [low, high) of each row.
  int low[2], high[2];

  __device__ Softmax(const Arguments& args, const Work& work) {
    for (int half = 0; half < 2; half++) {
      int token = (work.first_row + tile_row() + 8 * half) / args.heads;
      high[half] = args.causal ? work.start + token + 1 : work.end;
      int newest = args.causal ? high[half] : work.start;
      low[half] = args.window == UNLIMITED ? 0 : newest - args.window;
    }
  }
};

__device__ void mask_scores(float (&s)[32], const Softmax& softmax, const Arguments& args,
                            const Work& work, int block) {
  int origin = block_origin(work, block), column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int low = max(softmax.low[half], block * BLOCK_N) - origin, high = softmax.high[half] - origin;
    u64 bits = ~0ull;
    int start = work.start - origin;
    if (args.tree) {
      int row = work.first_row + tile_row() + 8 * half;
      u64 token = (work.request_row + row) / args.heads;
      bits = row < work.rows ? args.tree[token] : 0;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        int n = 8 * j + column + k;
        bool visible = n >= low && n < high;
        if (args.tree && n >= start) visible = visible && (bits >> (n - start & 63) & 1);
        if (!visible) s[4 * j + 2 * half + k] = __int_as_float(0xff800000);
      }
  }
}

// The maximum of a row's scores, times the scale.
__device__ float row_maximum(const float (&s)[32], int half, float scale) {
  float maximum = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
  for (int j = 1; j < 8; j++)
    maximum = fmaxf(maximum, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
  maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
  return fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2)) * scale;
}

// Scores to weights; returns the sum of this thread's.
__device__ float exponentiate(float (&s)[32], int half, float scale, float maximum) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int k = 0; k < 2; k++) {
      float& x = s[4 * j + 2 * half + k];
      x = exp2_approx(fmaf(x, scale, -maximum));
      sum += x;
    }
  return sum;
}

// Weights as the A operand of wgmma: four registers for each 16 positions.
__device__ void pack_weights(u32 (&p)[16], const float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 16; i++) p[i] = pack_bf16x2(s[2 * i], s[2 * i + 1]);
}

// 16 columns, from 16 k on, of the warp's 16 rows of a [64, 64] chunk.
__device__ void store_matrix(u32 chunk, int k, u32 a, u32 b, u32 c, u32 d) {
  int lane = threadIdx.x % 32;
  int row = threadIdx.x % 128 / 32 * 16 + lane % 16, column = 2 * k + lane / 16;
  u32 address = chunk + row * 128 + (column ^ (row & 7)) * 16;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ void store_weights(u32 chunk, const u32 (&p)[16]) {
#pragma unroll
  for (int k = 0; k < 4; k++)
    store_matrix(chunk, k, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]);
  fence_proxy_async();  // wgmma reads them
}

// Accumulators times one factor per row. After the first blocks the factors are nearly always 1.
__device__ void rescale(float (&o)[128], float first, float second) {
  if (!__any_sync(~0u, first != 1.f || second != 1.f)) return;
#pragma unroll
  for (int j = 0; j < 32; j++) {
    o[4 * j] *= first, o[4 * j + 1] *= first;
    o[4 * j + 2] *= second, o[4 * j + 3] *= second;
  }
}

// One of the two consumer warpgroups. It computes the scores of block WARPGROUP of each pair, and
// columns [256 WARPGROUP, 256 WARPGROUP + 256) of the output.
template <int WARPGROUP>
struct Consumer {
  const Arguments& args;
  const Smem& smem;
  const Work& work;

  // s = q Kᵀ, chunk by chunk as they arrive: first those that become free first.
  __device__ void start_scores(float (&s)[32], int i) const {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      int chunk = c < ROPE_CHUNK ? (c + 4 * WARPGROUP) % 8 : c;
      if (i == 0) mbarrier_wait(smem.q_full(chunk), 0);
      mbarrier_wait(smem.full(WARPGROUP, chunk), i & 1);
      wgmma_fence();  // after every branch
      u64 q = k_major_descriptor(smem.q(chunk));
      u64 k = k_major_descriptor(smem.block(WARPGROUP, chunk));
      if (c == 0) wgmma_scores<0>(s, q, k);
      else wgmma_scores<1>(s, q, k);
#pragma unroll
      for (int step = 1; step < 4; step++) wgmma_scores<1>(s, q + 2 * step, k + 2 * step);
    }
    wgmma_commit();
  }

  // o += P V with the weights of this warpgroup, in registers, or with those of the other.
  __device__ void start_values(float (&o)[128], const u32 (&p)[16]) const {
    u64 v = mn_major_descriptor(smem.block(WARPGROUP, 4 * WARPGROUP), CHUNK_BYTES);
    fence_registers(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_values(o, p + 4 * step, v + 128 * step);
    wgmma_commit();
  }

  __device__ void start_other_values(float (&o)[128]) const {
    u64 p = k_major_descriptor(smem.block(1 - WARPGROUP, ROPE_CHUNK));
    u64 v = mn_major_descriptor(smem.block(1 - WARPGROUP, 4 * WARPGROUP), CHUNK_BYTES);
    fence_registers(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_values(o, p + 2 * step, v + 128 * step);
    wgmma_commit();
  }

  // Tells the producers of the cluster that this warpgroup's half of a block has been read.
  __device__ void release(int buffer) const {
    int thread = threadIdx.x % 128;
    if (CLUSTER_SIZE == 1) {
      if (thread == 0) mbarrier_arrive(smem.empty(buffer, WARPGROUP));
    } else if (thread < CLUSTER_SIZE) {
      mbarrier_arrive_remote(smem.empty(buffer, WARPGROUP), thread);
    }
  }

  __device__ bool needs_mask(int block) const {
    return (block + 1) * BLOCK_N > work.full || block * BLOCK_N < work.clear;
  }

  // Of this thread's rows, to or from shared memory.
  __device__ void write_rows(float* to, const float (&x)[2]) const {
    if (threadIdx.x % 4 == 0) to[tile_row()] = x[0], to[tile_row() + 8] = x[1];
  }
  __device__ void read_rows(float (&x)[2], const float* from) const {
    x[0] = from[tile_row()], x[1] = from[tile_row() + 8];
  }

  // Warpgroup 0: the weights of block 0 are relative to the maximum so far; the other warpgroup
  // gets them relative to that of both blocks.
  __device__ void run0(float (&o)[128], Softmax& softmax) const {
    float s[32];
    u32 p[16], rescaled[16];
#pragma unroll 1
    for (int i = 0; i < work.num_pairs; i++) {
      start_scores(s, i);
      wgmma_wait<0>();
      fence_registers(s);
      int block = work.block + 2 * i;
      if (needs_mask(block)) mask_scores(s, softmax, args, work, block);
      float maximum[2], factor[2];
#pragma unroll
      for (int half = 0; half < 2; half++)
        maximum[half] = fmaxf(softmax.max[half], row_maximum(s, half, args.qk_scale));
      write_rows(smem.row_max(0), maximum);
      named_barrier_arrive(MAX0_READY, CONSUMER_THREADS);
      __syncwarp();
      read_rows(maximum, smem.row_max(0));  // keeps ptxas from arriving after the exponentials
#pragma unroll
      for (int half = 0; half < 2; half++) {
        factor[half] = exp2_approx(softmax.max[half] - maximum[half]);
        float sum = exponentiate(s, half, args.qk_scale, maximum[half]);
        softmax.sum[half] = softmax.sum[half] * factor[half] + sum;
      }
      pack_weights(p, s);
      rescale(o, factor[0], factor[1]);
      start_values(o, p);
      named_barrier_sync(P1_READY, CONSUMER_THREADS);
      read_rows(softmax.max, smem.row_max(1));
#pragma unroll
      for (int half = 0; half < 2; half++) {
        factor[half] = exp2_approx(maximum[half] - softmax.max[half]);
        softmax.sum[half] *= factor[half];
      }
#pragma unroll
      for (int j = 0; j < 32; j++) s[j] *= factor[j / 2 % 2];
      pack_weights(rescaled, s);
      store_weights(smem.block(0, ROPE_CHUNK), rescaled);
      named_barrier_arrive(P0_READY, CONSUMER_THREADS);
      wgmma_wait<0>();
      fence_registers(o);
      release(0);
      rescale(o, factor[0], factor[1]);
      start_other_values(o);
      wgmma_wait<0>();  // of the next scores, none could be computed before
      fence_registers(o);
      release(1);
    }
  }

  // Warpgroup 1.
  __device__ void run1(float (&o)[128], Softmax& softmax) const {
    float s[32];
    u32 p[16];
#pragma unroll 1
    for (int i = 0; i < work.num_pairs; i++) {
      start_scores(s, i);
      wgmma_wait<0>();
      fence_registers(s);
      int block = work.block + 2 * i + 1;
      if (needs_mask(block)) mask_scores(s, softmax, args, work, block);
      float maximum[2], own[2], factor[2];
#pragma unroll
      for (int half = 0; half < 2; half++) own[half] = row_maximum(s, half, args.qk_scale);
      named_barrier_sync(MAX0_READY, CONSUMER_THREADS);
      read_rows(maximum, smem.row_max(0));
#pragma unroll
      for (int half = 0; half < 2; half++) {
        maximum[half] = fmaxf(maximum[half], own[half]);
        factor[half] = exp2_approx(softmax.max[half] - maximum[half]);
        float sum = exponentiate(s, half, args.qk_scale, maximum[half]);
        softmax.sum[half] = softmax.sum[half] * factor[half] + sum;
        softmax.max[half] = maximum[half];
      }
      write_rows(smem.row_max(1), maximum);
      pack_weights(p, s);
      store_weights(smem.block(1, ROPE_CHUNK), p);
      named_barrier_arrive(P1_READY, CONSUMER_THREADS);
      rescale(o, factor[0], factor[1]);
      start_values(o, p);
      named_barrier_sync(P0_READY, CONSUMER_THREADS);
      start_other_values(o);
      wgmma_wait<1>();
      release(1);
      wgmma_wait<0>();
      fence_registers(o);
      release(0);
    }
  }

  __device__ void store_partial(const float (&o)[128], const Softmax& softmax,
                                const float (&total)[2]) const {
    constexpr int PARTS = LATENT / PART;
    float* out = (float*)args.out;
    int splits = args.num_splits;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = work.first_row + tile_row() + 8 * half;
      if (row >= work.rows) continue;
      u64 part = (work.request_row + row) * PARTS + 2 * WARPGROUP;
      float inverse = total[half] == 0.f ? 1.f : 1.f / total[half];
      float* to = out + (part * splits + work.split) * PART + threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < 32; j++)
        *(float2*)(to + (u64)(j / 16) * splits * PART + j % 16 * 8) =
            make_float2(o[4 * j + 2 * half] * inverse, o[4 * j + 2 * half + 1] * inverse);
      if (threadIdx.x % 4 < 2) {
        float lse = total[half] == 0.f ? __int_as_float(0xff800000)
                                       : softmax.max[half] + __log2f(total[half]);
        args.lse[(part + threadIdx.x % 4) * splits + work.split] = lse;
      }
    }
  }

  // Through shared memory, where q was, so that a warp stores 512 contiguous bytes.
  __device__ void store(const float (&o)[128], const float (&total)[2]) const {
    float a = total[0] == 0.f ? 1.f : 1.f / total[0], b = total[1] == 0.f ? 1.f : 1.f / total[1];
    int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16;
#pragma unroll
    for (int k = 0; k < 16; k++)
      store_matrix(smem.q(4 * WARPGROUP + k / 4), k % 4,
                   pack_bf16x2(o[8 * k] * a, o[8 * k + 1] * a),
                   pack_bf16x2(o[8 * k + 2] * b, o[8 * k + 3] * b),
                   pack_bf16x2(o[8 * k + 4] * a, o[8 * k + 5] * a),
                   pack_bf16x2(o[8 * k + 6] * b, o[8 * k + 7] * b));
    __syncwarp();
    u32 from = smem.q(4 * WARPGROUP + lane / 8);
    for (int row = first; row < first + 16 && work.first_row + row < work.rows; row++) {
      uint4 v;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(from + row * 128 + (lane % 8 ^ (row & 7)) * 16) : "memory");
      u64 to = (work.request_row + work.first_row + row) * LATENT + HALF * WARPGROUP + 8 * lane;
      *(uint4*)((u16*)args.out + to) = v;
    }
  }

  __device__ void run() const {
    griddepcontrol_wait();
    Softmax softmax(args, work);
    float o[128];
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0.f;
    if constexpr (WARPGROUP == 0) run0(o, softmax);
    else run1(o, softmax);
    float total[2], other[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      total[half] = softmax.sum[half];
      for (int by = 1; by < 4; by *= 2) total[half] += __shfl_xor_sync(~0u, total[half], by);
    }
    write_rows(smem.row_sum(WARPGROUP), total);
    named_barrier_sync(SUMS_READY, CONSUMER_THREADS);
    read_rows(other, smem.row_sum(1 - WARPGROUP));
    for (int half = 0; half < 2; half++) total[half] += other[half];
    if (args.num_splits > 1) store_partial(o, softmax, total);
    else store(o, total);
  }
};

// --- kernel --------------------------------------------------------------------------------------

// Warp 0: producer. Warps 4 to 7 and 8 to 11: consumers.
extern "C" __global__ void __cluster_dims__(CLUSTER_SIZE, 1, 1) __launch_bounds__(384, 1)
mla_sm90_kernel(const __grid_constant__ TmaDescriptor q_descriptor,
                const __grid_constant__ TmaDescriptor pool_descriptor, void* out, float* lse,
                const int* page_table, const int* start, const int4* tile_map, const u64* tree,
                float qk_scale, int heads, int q_len, int causal, int window,
                int page_table_stride, int row_tiles, int num_splits) {
  if (tile_map) griddepcontrol_wait();  // as if it were launched without PDL
  else griddepcontrol_launch_dependents();
  extern __shared__ unsigned char bytes[];
  u32 base = (smem_address(bytes) + 1023) & ~1023u;
  float* rows = (float*)(bytes + (base - smem_address(bytes)) + 3 * BLOCK_BYTES);
  Smem smem{base, rows, smem_address(rows + 4 * 64)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3 * CHUNKS; i++) mbarrier_init(smem.barriers + 8 * i, 1);
    for (int i = 0; i < 4; i++) mbarrier_init(smem.empty(i / 2, i % 2), CLUSTER_SIZE);
    mbarrier_init_fence();
  }
  Arguments args{out,   lse,   page_table, start,  tile_map,          tree,      qk_scale,
                 heads, q_len, causal,     window, page_table_stride, row_tiles, num_splits};
  int cta_rank = blockIdx.x % CLUSTER_SIZE, warp = threadIdx.x / 32;
  Work work = find_work(args, cta_rank);
  cluster_sync<CLUSTER_SIZE>();

  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      const int* table = page_table + (u64)work.request * page_table_stride;
      Producer{q_descriptor, pool_descriptor, smem, work, table, cta_rank}.run(tile_map != nullptr);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (warp < 8) Consumer<0>{args, smem, work}.run();
    else Consumer<1>{args, smem, work}.run();
  }
}
