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
//   SPLIT_K     CTAs along K: one cluster, which adds up its accumulators, unless SPLIT_K_PARTIALS
//   NUM_STAGES  stages of the SMEM pipeline
//   SILU_MUL    W is [gate; up]: out = SiLU(x gateᵀ) * (x upᵀ)
//   BIAS        add
//   SPLIT_K_PARTIALS  out is [SPLIT_K, M, N] float32: the reader adds up
//   THREADS     of consumers, the producer, and warps that are idle
//   WGMMA       multiplies by wgmma, 64 rows of W at a time, with the same sums
//   WGMMA_TOKENS, WGMMA_BUFFERS  tokens of an instruction, chunks of W in registers
//   WGMMA_SHAPE, WGMMA_SUM, WGMMA_W, WGMMA_X, WGMMA_ADDS, WGMMA_SUM_OPERANDS  text of the instruction
//   REGISTERS   of a thread, neither more nor less; 0: as the compiler likes

#ifndef TOKENS  // opened in an IDE: one consistent configuration
#define TOKENS 16
#define ROW_BLOCKS 1
#define ROW_WARPS 8
#define K_WARPS 1
#define STAGE_GROUPS 1
#define SPLIT_K 2
#define NUM_STAGES 8
#define SILU_MUL 0
#define BIAS 0
#define SPLIT_K_PARTIALS 0
#define THREADS 288
#define WGMMA 0
#define REGISTERS 0
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
constexpr int CLUSTER_K = SPLIT_K_PARTIALS ? 1 : SPLIT_K;
static_assert(!SPLIT_K_PARTIALS || K_WARPS == 1, "partials are stored from registers");
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

// acc = the same.
__device__ void first_mma(float (&acc)[4], const u32 (&w)[4], u32 x0, u32 x1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(acc[0]), "=f"(acc[1]), "=f"(acc[2]), "=f"(acc[3])
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x0), "r"(x1), "f"(0.f));
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
  auto load_x = [&](int i, int stage) {  // wgmma: chunks have a fixed distance
    for (int chunk = 0; chunk < STAGE_CHUNKS; chunk += WGMMA ? 1 : STAGE_CHUNKS)
      tma_load(pipeline.x + stage * X_STAGE_BYTES + chunk * TOKENS * 128, x, 0, tile.first_token,
               2 * tile.first_group + i * STAGE_CHUNKS + chunk, pipeline.full(stage), EVICT_NORMAL);
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
    float sum[ROW_BLOCKS][SUBTILE / 8][4];
    if (SUBTILE == 8) {
#pragma unroll
      for (int k = 0; k < 4; k += 2) {  // a matrix: 8 tokens, 8 columns
        u32 xs[4];
        ldmatrix(xs, x + row * 128 + (((2 * k + matrix) ^ swizzle) << 4));
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; block++) {
          if (k == 0) first_mma(sum[block][0], w[block][0], xs[0], xs[1]);
          else mma(sum[block][0], w[block][k], xs[0], xs[1]);
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
          float(&last)[4] = sum[block][SUBTILE / 8 - 1];
          if (k == 0) first_mma(sum[block][0], w[block][0], xs[0], xs[1]);
          else mma(sum[block][0], w[block][k], xs[0], xs[1]);
          if (k == 0) first_mma(last, w[block][0], xs[2], xs[3]);
          else mma(last, w[block][k], xs[2], xs[3]);
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

#if WGMMA
static_assert(ROW_BLOCKS == 1 && ROW_WARPS % 4 == 0, "a warpgroup has 64 rows");

// sum = 64 rows of W times WGMMA_TOKENS, 16 deep; or += if `adds`.
__device__ void wgmma(float (&sum)[WGMMA_TOKENS / 2], const u32 (&w)[4], u64 x, int adds) {
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.b32 p, " WGMMA_ADDS ", 0;\n"
      "wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.bf16.bf16 {" WGMMA_SUM "}, {" WGMMA_W
      "}, " WGMMA_X ", p, 1, 1, 0; }"
      : WGMMA_SUM_OPERANDS
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(adds));
}

// acc += scale * (x times each chunk), as multiply_chunk does it. words, x: of the first chunk, in SMEM.
__device__ void multiply_chunks(Accumulators& acc, u32 words,
                                const float (&scale)[(CHUNKS + 1) / 2][ROW_BLOCKS][2],
                                const u32 (&zero)[(CHUNKS + 1) / 2][ROW_BLOCKS][2], u32 x) {
  constexpr int BUFFERS = WGMMA_BUFFERS;  // 2: one chunk is converted while one is multiplied
  u32 w[BUFFERS][4][4];
  float sum[WGMMA_TOKENS / 2];
  auto convert = [&](int chunk) {
    uint4 word = load_shared(words + chunk / 2 * BLOCK_BYTES + chunk % 2 * CHUNK_BYTES);
    dequantize(w[chunk % BUFFERS][0], word.x, zero[chunk / 2][0]);
    dequantize(w[chunk % BUFFERS][1], word.y, zero[chunk / 2][0]);
    dequantize(w[chunk % BUFFERS][2], word.z, zero[chunk / 2][0]);
    dequantize(w[chunk % BUFFERS][3], word.w, zero[chunk / 2][0]);
  };
  if (BUFFERS == 2) convert(0);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    if (BUFFERS == 1) convert(chunk);
#pragma unroll
    for (int first = 0; first < TOKENS; first += WGMMA_TOKENS) {
      u64 tokens = k_major_descriptor(x + (chunk * TOKENS + first) * 128);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) wgmma(sum, w[chunk % BUFFERS][k], tokens + 2 * k, k > 0);
      wgmma_commit();
      if (BUFFERS == 2 && first + WGMMA_TOKENS == TOKENS && chunk + 1 < CHUNKS) convert(chunk + 1);
      wgmma_wait<0>();
      fence_registers(sum);
#pragma unroll
      for (int j = 0; j < WGMMA_TOKENS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          acc[0][first / 8 + j][i] =
              fmaf(scale[chunk / 2][0][i / 2], sum[4 * j + i], acc[0][first / 8 + j][i]);
    }
  }
}
#endif

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
    float scale[GROUPS][ROW_BLOCKS][2];
    u32 zero[GROUPS][ROW_BLOCKS][2];
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; block++) {
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
#if WGMMA
    multiply_chunks(acc, w + words_offset, scale, zero, x + first_chunk * TOKENS * 128);
#else
    uint4 words[CHUNKS][ROW_BLOCKS];
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
        words[chunk][block] = load_shared(w + words_offset + block * W_BLOCK_BYTES +
                                          chunk / 2 * BLOCK_BYTES + chunk % 2 * CHUNK_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      multiply_chunk(acc, words[chunk], scale[chunk / 2], zero[chunk / 2],
                     x, (first_chunk + chunk) * tile.x_rows);
#endif
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

// A thread's sums, to partials [rank][token][row]: 8 rows of a token are a sector of 32 bytes.
__device__ void store_partials(const Accumulators& acc, float* out, const Tile& tile, int row_warp,
                               int rank, int M, int N) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int row = (tile.index * TILE_BLOCKS + row_warp * ROW_BLOCKS + block) * BLOCK_ROWS +
                  lane / 4 + i / 2 * 8;
        int token = 8 * j + lane % 4 * 2 + i % 2;
        if (token < tile.x_rows && row < N)
          out[((u64)rank * M + tile.first_token + token) * N + row] = acc[block][j][i];
      }
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

#if REGISTERS
#define LAUNCH_BOUNDS __maxnreg__(REGISTERS)
#else
#define LAUNCH_BOUNDS __launch_bounds__(THREADS, 1)
#endif

// The last warp is the producer. Shared memory: x, W, mbarriers; the sums overlay x and W.
extern "C" __global__ void __cluster_dims__(CLUSTER_K, 1, 1)
LAUNCH_BOUNDS
gemm_int4_sm90_kernel(const __grid_constant__ TmaDescriptor x,
                      const __grid_constant__ TmaDescriptor w, void* out, const u32* bias, int M,
                      int N, int K, int tiles_n) {
  griddepcontrol_launch_dependents();
#if REGISTERS  // never executed: with it, ptxas allocates all that __maxnreg__ allows
  if (K == 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
  extern __shared__ unsigned char smem[];
  u32 offset = ((smem_address(smem) + 1023) & ~1023u) - smem_address(smem);
  u32 base = smem_address(smem) + offset;
  u32 w_stages = base + NUM_STAGES * X_STAGE_BYTES;
  u32 barriers = w_stages + NUM_STAGES * W_STAGE_BYTES;
  Pipeline pipeline{base, w_stages, barriers, barriers + 8 * NUM_STAGES};
  // Tiles of tokens with the same rows of W are neighbours in time: the second finds them in L2.
  int rank = blockIdx.x % SPLIT_K, tiles_m = gridDim.x / SPLIT_K / tiles_n;
  int work_tile = blockIdx.x / SPLIT_K, units = K / GROUP / STAGE_GROUPS;
  int first_unit = units * rank / SPLIT_K;
  Tile tile{work_tile / tiles_m, work_tile % tiles_m * TOKENS, 0, first_unit * STAGE_GROUPS,
            units * (rank + 1) / SPLIT_K - first_unit};
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
  } else if (warp > CONSUMER_WARPS) {  // idle
    if (CLUSTER_K > 1) cluster_barrier();
  } else {
    Accumulators acc = {};
    consume(acc, pipeline, tile, warp % ROW_WARPS, warp / ROW_WARPS);
    if (SPLIT_K_PARTIALS) {
      griddepcontrol_wait();  // before `out` is written
      store_partials(acc, (float*)out, tile, warp, rank, M, N);
      return;
    }
    store_sums(acc, (float*)(smem + offset), warp % ROW_WARPS, warp / ROW_WARPS);
    if (CLUSTER_K > 1) cluster_barrier();
    else named_barrier_sync(1, CONSUMERS);
    griddepcontrol_wait();
    epilogue(base, (u32*)out, bias, tile, rank, N);
  }
  if (CLUSTER_K > 1) cluster_barrier();  // no CTA exits while others read its sums
}
