// GEMM with 4-bit weights for Hopper (sm_90a): out = epilogue(x Wᵀ), with x [M, K] in bfloat16, up to
// TOKENS rows, and W [N, K] in groups of 4-bit integers. gemm_int4_sm90.py explains the design,
// compiles and launches it; int4.py has the layout of W.
//
// gemm_int4_sm90.py puts its configuration in front of this file, as macros:
//   TOKENS      rows of x per tile: 8, 16, 32, 64, 128
//   ROW_BLOCKS  blocks of 16 rows of W per warp
//   ROW_WARPS   warps along N
//   K_WARPS     warps along K: each takes an equal part of a stage's chunks of 64 columns
//   STAGE_GROUPS  groups of a stage, 1 or 2
//   CLUSTER_K   CTAs along K, one cluster, which adds up its accumulators
//   NUM_STAGES  stages of the SMEM pipeline
//   SILU_MUL    W is [gate; up]: out = SiLU(x gateᵀ) * (x upᵀ)
//   BIAS        add

#ifndef TOKENS  // opened in an IDE: one consistent configuration
#define TOKENS 16
#define ROW_BLOCKS 1
#define ROW_WARPS 8
#define K_WARPS 1
#define STAGE_GROUPS 1
#define CLUSTER_K 2
#define NUM_STAGES 8
#define SILU_MUL 0
#define BIAS 0
#endif

#include "sm90.cuh"

constexpr int GROUP = 128;                     // columns with one scale
constexpr int CHUNK = 64, STAGE_CHUNKS = 2 * STAGE_GROUPS;  // columns; chunks of a stage
constexpr int CHUNKS = STAGE_CHUNKS / K_WARPS;              // of a warp
constexpr int BLOCK_ROWS = 16;                 // rows of W of one mma.sync
constexpr int CHUNK_BYTES = BLOCK_ROWS * CHUNK / 2;
constexpr int BLOCK_BYTES = 2 * CHUNK_BYTES + 4 * BLOCK_ROWS;  // of a block of rows: with scales
constexpr int TILE_BLOCKS = ROW_BLOCKS * ROW_WARPS, TILE_ROWS = BLOCK_ROWS * TILE_BLOCKS;
constexpr int TILE_N = SILU_MUL ? TILE_ROWS / 2 : TILE_ROWS;   // output columns
constexpr int CONSUMER_WARPS = ROW_WARPS * K_WARPS, CONSUMERS = 32 * CONSUMER_WARPS;
constexpr int X_STAGE_BYTES = STAGE_CHUNKS * TOKENS * 128;
constexpr int W_BLOCK_BYTES = STAGE_GROUPS * BLOCK_BYTES;  // a block of rows in a stage
constexpr int W_STAGE_BYTES = TILE_BLOCKS * W_BLOCK_BYTES;
constexpr int SUBTILE = TOKENS < 16 ? TOKENS : 16;  // tokens of which a chunk is summed at a time
constexpr int SUM_STRIDE = TILE_ROWS + 4;           // floats per token of the sums
static_assert(W_STAGE_BYTES % 128 == 0 && STAGE_CHUNKS % K_WARPS == 0, "TMA; equal parts");

// --- mma, clusters -------------------------------------------------------------------------------

// Four 8 x 8 matrices: lane l has the address of row l % 8 of matrix l / 8.
__device__ void ldmatrix(u32 (&x)[4], u32 smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(smem));
}

__device__ uint4 load_shared(u32 smem) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem));
  return v;
}

__device__ u32 load_shared_word(u32 smem) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(smem));
  return v;
}

__device__ float4 load_cluster(u32 smem) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(smem));
  return v;
}

// acc += 16 rows of W times 8 tokens, 16 deep.
__device__ void mma(float (&acc)[4], const u32 (&w)[4], u32 x0, u32 x1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x0), "r"(x1));
}

__device__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// --- 4-bit integers ------------------------------------------------------------------------------

// (word >> shift & 0x000f000f) | 0x43004300: the bfloat16 numbers 128 + q.
__device__ u32 plus_128(u32 word, int shift) {
  u32 out;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(out) : "r"(word >> shift));
  return out;
}

__device__ u32 sub_bf16x2(u32 a, u32 b) {
  u32 out;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// The operand of mma from its 8 integers: q - zero, exactly. zero: 128 + zero, twice, of a thread's
// two rows.
__device__ void dequantize(u32 (&w)[4], u32 word, const u32 (&zero)[2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = sub_bf16x2(plus_128(word, 4 * i), zero[i % 2]);
}

__device__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// --- producer warp -------------------------------------------------------------------------------

struct Pipeline {
  u32 x, w, full_barriers, empty_barriers;
  __device__ u32 full(int stage) const { return full_barriers + 8 * stage; }
  __device__ u32 empty(int stage) const { return empty_barriers + 8 * stage; }
};

// A CTA's tile: rows of W, tokens, and groups of K.
struct Tile {
  int index, first_token, x_rows, first_group, stages;  // x_rows: of x that are loaded
};

// One thread. W does not wait for the preceding kernel.
__device__ void produce(const TmaDescriptor& x, const TmaDescriptor& w, const Pipeline& pipeline,
                        const Tile& tile, int N) {
  constexpr int MATRICES = 1 + SILU_MUL, BLOCKS = TILE_BLOCKS / MATRICES;
  auto load_w = [&](int i, int stage) {
    u32 full = pipeline.full(stage);
    mbarrier_arrive_expect_tx(full, W_STAGE_BYTES + STAGE_CHUNKS * 128 * tile.x_rows);
    for (int matrix = 0; matrix < MATRICES; matrix++)  // gate, then up
      tma_load(pipeline.w + stage * W_STAGE_BYTES + matrix * (W_STAGE_BYTES / MATRICES), w, 0,
               tile.first_group + i * STAGE_GROUPS, tile.index * BLOCKS + matrix * (N / BLOCK_ROWS),
               full, EVICT_FIRST);
  };
  auto load_x = [&](int i, int stage) {
    tma_load(pipeline.x + stage * X_STAGE_BYTES, x, 0, tile.first_token,
             2 * tile.first_group + i * STAGE_CHUNKS, pipeline.full(stage), EVICT_NORMAL);
  };
  int filled = min(NUM_STAGES, tile.stages);
  for (int i = 0; i < filled; i++) load_w(i, i);
  griddepcontrol_wait();
  for (int i = 0; i < filled; i++) load_x(i, i);
  for (int i = filled, stage = 0, phase = 0; i < tile.stages; i++) {
    mbarrier_wait(pipeline.empty(stage), phase);
    load_w(i, stage);
    load_x(i, stage);
    if (++stage == NUM_STAGES) stage = 0, phase ^= 1;
  }
}

// --- consumer warps ------------------------------------------------------------------------------

// acc[block of rows][8 tokens]: a thread has rows lane / 4 (0, 1) and lane / 4 + 8 (2, 3) of tokens
// 2 (lane % 4) and the next.
using Accumulators = float[ROW_BLOCKS][TOKENS / 8][4];

// acc += scale * (x times one chunk). words: of the thread, one per 16 columns. first_row: of the chunk
// of x, in rows of 128 bytes.
__device__ void multiply_chunk(Accumulators& acc, const uint4 (&words)[ROW_BLOCKS],
                               const float (&scale)[ROW_BLOCKS][2],
                               const u32 (&zero)[ROW_BLOCKS][2], u32 x, int first_row) {
  u32 w[ROW_BLOCKS][4][4];
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; block++) {
    dequantize(w[block][0], words[block].x, zero[block]);
    dequantize(w[block][1], words[block].y, zero[block]);
    dequantize(w[block][2], words[block].z, zero[block]);
    dequantize(w[block][3], words[block].w, zero[block]);
  }
  int lane = threadIdx.x % 32, matrix = lane / 8, row = first_row + lane % 8, swizzle = row % 8;
#pragma unroll
  for (int first = 0; first < TOKENS; first += SUBTILE) {
    float sum[ROW_BLOCKS][SUBTILE / 8][4] = {};
    if (SUBTILE == 8) {
#pragma unroll
      for (int k = 0; k < 4; k += 2) {  // a matrix: 8 tokens, 8 columns
        u32 xs[4];
        ldmatrix(xs, x + row * 128 + (((2 * k + matrix) ^ swizzle) << 4));
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; block++) {
          mma(sum[block][0], w[block][k], xs[0], xs[1]);
          mma(sum[block][0], w[block][k + 1], xs[2], xs[3]);
        }
      }
    } else {
      u32 address = x + (first + matrix / 2 * 8 + row) * 128;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        u32 xs[4];
        ldmatrix(xs, address + (((2 * k + matrix % 2) ^ swizzle) << 4));
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; block++) {
          mma(sum[block][0], w[block][k], xs[0], xs[1]);
          mma(sum[block][SUBTILE / 8 - 1], w[block][k], xs[2], xs[3]);
        }
      }
    }
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
      for (int j = 0; j < SUBTILE / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          acc[block][first / 8 + j][i] =
              fmaf(scale[block][i / 2], sum[block][j][i], acc[block][first / 8 + j][i]);
  }
}

__device__ void consume(Accumulators& acc, const Pipeline& pipeline, const Tile& tile, int row_warp,
                        int k_warp) {
  constexpr int GROUPS = (CHUNKS + 1) / 2;  // of a warp in a stage
  int lane = threadIdx.x % 32, first_chunk = k_warp * CHUNKS, first_group = first_chunk / 2;
  u32 offset = row_warp * ROW_BLOCKS * W_BLOCK_BYTES + first_group * BLOCK_BYTES;
  u32 words_offset = offset + first_chunk % 2 * CHUNK_BYTES + lane * 16;
  u32 scales_offset = offset + 2 * CHUNK_BYTES + lane / 4 * 4;
  for (int i = 0, stage = 0, phase = 0; i < tile.stages; i++) {
    u32 w = pipeline.w + stage * W_STAGE_BYTES, x = pipeline.x + stage * X_STAGE_BYTES;
    mbarrier_wait(pipeline.full(stage), phase);
    uint4 words[CHUNKS][ROW_BLOCKS];
    float scale[GROUPS][ROW_BLOCKS][2];
    u32 zero[GROUPS][ROW_BLOCKS][2];
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; block++) {
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
        words[chunk][block] = load_shared(w + words_offset + block * W_BLOCK_BYTES +
                                          chunk / 2 * BLOCK_BYTES + chunk % 2 * CHUNK_BYTES);
#pragma unroll
      for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int half = 0; half < 2; half++) {  // scale: float32, its lowest byte the zero point
          u32 word = load_shared_word(w + scales_offset + block * W_BLOCK_BYTES +
                                      group * BLOCK_BYTES + 32 * half);
          scale[group][block][half] = __uint_as_float(word & 0xffffff00u);
          zero[group][block][half] = (word & 0xff) * 0x10001u + 0x43004300u;
        }
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      multiply_chunk(acc, words[chunk], scale[chunk / 2], zero[chunk / 2], x,
                     (first_chunk + chunk) * tile.x_rows);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(pipeline.empty(stage));
    if (++stage == NUM_STAGES) stage = 0, phase ^= 1;
  }
}

// --- epilogue ------------------------------------------------------------------------------------

// Adds up the accumulators of the warps along K in shared memory, [token][row].
__device__ void store_sums(const Accumulators& acc, float* sums, int row_warp, int k_warp) {
  int lane = threadIdx.x % 32;
  for (int turn = 0; turn < K_WARPS; turn++) {
    named_barrier_sync(1, CONSUMERS);  // at first: all have read the pipeline, which `sums` overlays
    if (turn != k_warp) continue;
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
      for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int row = (row_warp * ROW_BLOCKS + block) * BLOCK_ROWS + lane / 4 + i / 2 * 8;
          int token = 8 * j + lane % 4 * 2 + i % 2;
          float* sum = sums + token * SUM_STRIDE + row;
          *sum = turn == 0 ? acc[block][j][i] : *sum + acc[block][j][i];
        }
  }
}

// Four rows of a token, added up across the cluster.
__device__ float4 cluster_sum(u32 sums, int token, int row) {
  u32 address = sums + (token * SUM_STRIDE + row) * 4;
  float4 total = load_cluster(CLUSTER_K > 1 ? remote_smem(address, 0) : address);
#pragma unroll
  for (int rank = 1; rank < CLUSTER_K; rank++) {
    float4 v = load_cluster(remote_smem(address, rank));
    total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
  }
  return total;
}

__device__ float4 add_bias(float4 v, const u32* bias, int column) {
  if (!BIAS) return v;
  u32 a = bias[column / 2], b = bias[column / 2 + 1];
  return make_float4(v.x + low(a), v.y + high(a), v.z + low(b), v.w + high(b));
}

// Each CTA of the cluster stores an equal part of the tile's columns.
__device__ void epilogue(u32 sums, u32* out, const u32* bias, const Tile& tile, int rank, int N) {
  constexpr int COLUMNS = TILE_N / CLUSTER_K, QUADS = COLUMNS / 4;
  static_assert(TILE_N % (4 * CLUSTER_K) == 0, "whole quads");
  for (int i = threadIdx.x; i < tile.x_rows * QUADS; i += CONSUMERS) {
    int token = i / QUADS, row = rank * COLUMNS + i % QUADS * 4;
    int column = tile.index * TILE_N + row;
    if (column >= N) continue;
    float4 v = add_bias(cluster_sum(sums, token, row), bias, column);
    if (SILU_MUL) {
      float4 up = add_bias(cluster_sum(sums, token, TILE_N + row), bias, N + column);
      v = make_float4(silu(v.x) * up.x, silu(v.y) * up.y, silu(v.z) * up.z, silu(v.w) * up.w);
    }
    *(uint2*)(out + ((u64)(tile.first_token + token) * N + column) / 2) =
        make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
  }
}

// --- kernel --------------------------------------------------------------------------------------

// The last warp is the producer. Shared memory: x, W, mbarriers; the sums overlay x and W.
extern "C" __global__ void __cluster_dims__(CLUSTER_K, 1, 1)
__launch_bounds__(CONSUMERS + 32, 1)
gemm_int4_sm90_kernel(const __grid_constant__ TmaDescriptor x,
                      const __grid_constant__ TmaDescriptor w, u32* out, const u32* bias, int M,
                      int N, int K, int tiles_n) {
  griddepcontrol_launch_dependents();
  extern __shared__ unsigned char smem[];
  u32 offset = ((smem_address(smem) + 1023) & ~1023u) - smem_address(smem);
  u32 base = smem_address(smem) + offset;
  u32 barriers = base + NUM_STAGES * (X_STAGE_BYTES + W_STAGE_BYTES);
  Pipeline pipeline{base, base + NUM_STAGES * X_STAGE_BYTES, barriers, barriers + 8 * NUM_STAGES};
  // Tiles of tokens with the same rows of W are neighbours in time: the second finds them in L2.
  int rank = blockIdx.x % CLUSTER_K, tiles_m = gridDim.x / CLUSTER_K / tiles_n;
  int work_tile = blockIdx.x / CLUSTER_K, units = K / GROUP / STAGE_GROUPS;
  int first_unit = units * rank / CLUSTER_K;
  Tile tile{work_tile / tiles_m, work_tile % tiles_m * TOKENS, 0, first_unit * STAGE_GROUPS,
            units * (rank + 1) / CLUSTER_K - first_unit};
  // The last tile of tokens may overlap the one before: boxes that extend past the end are slow.
  tile.first_token = max(min(tile.first_token, M - TOKENS), 0);
  tile.x_rows = min(M, TOKENS);
  if (threadIdx.x == 0) {
    for (int i = 0; i < NUM_STAGES; i++) {
      mbarrier_init(pipeline.full(i), 1);
      mbarrier_init(pipeline.empty(i), CONSUMER_WARPS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  int warp = threadIdx.x / 32;
  if (warp == CONSUMER_WARPS) {
    if (threadIdx.x % 32 == 0) produce(x, w, pipeline, tile, N);
    __syncwarp();
    if (CLUSTER_K > 1) cluster_barrier();
  } else {
    Accumulators acc = {};
    consume(acc, pipeline, tile, warp % ROW_WARPS, warp / ROW_WARPS);
    store_sums(acc, (float*)(smem + offset), warp % ROW_WARPS, warp / ROW_WARPS);
    if (CLUSTER_K > 1) cluster_barrier();
    else named_barrier_sync(1, CONSUMERS);
    griddepcontrol_wait();  // before `out` is written
    epilogue(base, out, bias, tile, rank, N);
  }
  if (CLUSTER_K > 1) cluster_barrier();  // no CTA exits while others read its sums
}
