// Persistent, warp-specialized TMA + wgmma GEMM for Hopper (sm_90a): out = epilogue(x Wᵀ), with
// x [M, K] and W [N, K] in bfloat16. gemm_sm90.py explains the design, compiles and launches it.
//
// gemm_sm90.py puts its configuration in front of this file, as macros:
//   BLOCK_N              rows of W per tile; with SILU_MUL half gate, half up
//   CONSUMER_WARPGROUPS  1 or 2; each computes 64 rows of x
//   CLUSTER_M            1 or 2 CTAs along M that share W by multicast
//   GROUP_M              tile rasterization: clusters along M that advance together along N; 0: all
//   NUM_STAGES           stages of the SMEM pipeline
//   MAX_DEFERRED_NORM_M  rows for which 1 / rms is kept in shared memory
//   EPILOGUE_STRIDE      floats per row of the epilogue's staging buffer
//   K_SLICES             1 or 2 halves of K, added up as the reader of SPLIT_K_PARTIALS adds partials
// the epilogue's steps, 0 or 1:
//   SILU_MUL             W is [gate; up]: out = SiLU(x gateᵀ) * (x upᵀ)
//   SPLIT_K_PARTIALS     out is [split_k, M, N] float, to be summed by the next kernel
//   ARGMAX               out is each tile's maximum per row, with its index
//   DEFERRED_NORM_IN     multiply by 1 / rms, from the sums of squares of the GEMM before
//   RESIDUAL, BIAS       add
//   DEFERRED_NORM_OUT    also store out * norm_weight and each tile's sums of squares
// and the operands of wgmma as asm text:
//   WGMMA_SHAPE, WGMMA_ACC, WGMMA_X, WGMMA_W, WGMMA_ACC_OPERANDS

#ifndef BLOCK_N  // opened in an IDE: one consistent configuration
#define BLOCK_N 32
#define CONSUMER_WARPGROUPS 1
#define CLUSTER_M 1
#define GROUP_M 0
#define NUM_STAGES 8
#define MAX_DEFERRED_NORM_M 512
#define EPILOGUE_STRIDE 40
#define K_SLICES 1
#define SILU_MUL 0
#define SPLIT_K_PARTIALS 0
#define ARGMAX 0
#define DEFERRED_NORM_IN 0
#define RESIDUAL 0
#define DEFERRED_NORM_OUT 0
#define BIAS 0
#define WGMMA_SHAPE "m64n32k16"
#define WGMMA_ACC "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_X "%16"
#define WGMMA_W "%17"
#define WGMMA_ACC_OPERANDS                                                                   \
  "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]),        \
      "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]),  \
      "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15])
#endif

#include "sm90.cuh"

constexpr int BLOCK_M = 64 * CONSUMER_WARPGROUPS;
constexpr int BLOCK_K = 64;       // 128 bytes, the width of the swizzle
constexpr int ROW_BYTES = 128;    // of a tile in shared memory
constexpr int X_STAGE_BYTES = BLOCK_M * ROW_BYTES, W_STAGE_BYTES = BLOCK_N * ROW_BYTES;
constexpr int PIPELINE_BYTES = NUM_STAGES * (X_STAGE_BYTES + W_STAGE_BYTES);
constexpr int TILE_N = SILU_MUL ? BLOCK_N / 2 : BLOCK_N;  // output columns of a tile
constexpr int STAGING_FLOATS = ARGMAX ? 0 : 16 * EPILOGUE_STRIDE;  // per consumer warp

// --- wgmma, SiLU ---------------------------------------------------------------------------------

// acc += 64 rows of x times BLOCK_N rows of W, 16 deep.
__device__ void wgmma(float (&acc)[BLOCK_N / 2], u64 x_descriptor, u64 w_descriptor) {
  asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.bf16.bf16 {" WGMMA_ACC "}, " WGMMA_X
               ", " WGMMA_W ", 1, 1, 1, 0, 0;"
               : WGMMA_ACC_OPERANDS : "l"(x_descriptor), "l"(w_descriptor));
}

__device__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// --- tile scheduler and SMEM pipeline ------------------------------------------------------------

// Static persistent scheduler. A work tile is CLUSTER_M output tiles along M, one along N and one
// of `split_k` slices of K; cluster c computes work tiles c, c + num_clusters, ...
struct TileScheduler {
  int work_tiles, cluster_tiles_m, split_k, k_blocks;  // k_blocks: of one slice of K
  int cluster, num_clusters, cta_rank;
  int max_row, box_rows;  // the last row at which a tile may begin; rows of a TMA box of x
  // (cluster tile along M, tile along N). M varies fastest, within groups of GROUP_M.
  __device__ int2 tile_coord(int work_tile) const {
    work_tile /= split_k;
    if (GROUP_M == 0) return make_int2(work_tile % cluster_tiles_m, work_tile / cluster_tiles_m);
    int tiles_n = work_tiles / split_k / cluster_tiles_m;
    int group = work_tile / (GROUP_M * tiles_n), in_group = work_tile % (GROUP_M * tiles_n);
    int group_size = min(GROUP_M, cluster_tiles_m - group * GROUP_M);
    return make_int2(group * GROUP_M + in_group % group_size, in_group / group_size);
  }
  // The last tiles may overlap: TMA boxes that extend past the last row are slow.
  __device__ int row(int work_tile) const {
    return min((tile_coord(work_tile).x * CLUSTER_M + cta_rank) * BLOCK_M, max_row);
  }
  __device__ int tile_n(int work_tile) const { return tile_coord(work_tile).y; }
  __device__ int k_slice(int work_tile) const { return work_tile % split_k; }
};

// Shared-memory addresses. full: x and W have arrived; empty: the consumers have read them.
struct SmemPipeline {
  u32 x, w, full_barriers, empty_barriers;
  __device__ u32 full(int stage) const { return full_barriers + 8 * stage; }
  __device__ u32 empty(int stage) const { return empty_barriers + 8 * stage; }
};

struct PipelineState {
  int stage = 0, phase = 0;
  __device__ void advance() {
    if (++stage == NUM_STAGES) { stage = 0; phase ^= 1; }
  }
};

// --- producer warpgroup --------------------------------------------------------------------------

// Each CTA of a cluster loads its share of the W tile's rows for all.
__device__ void produce_w(const TmaDescriptor& descriptor, const SmemPipeline& pipeline,
                          const TileScheduler& scheduler, int N) {
  constexpr int MATRICES = 1 + SILU_MUL, ROWS_PER_CTA = TILE_N / CLUSTER_M;
  // Read once, or again by the tiles further along M.
  u64 cache_policy = scheduler.cluster_tiles_m == 1 ? EVICT_FIRST : EVICT_NORMAL;
  PipelineState state;
  for (int t = scheduler.cluster; t < scheduler.work_tiles; t += scheduler.num_clusters) {
    int row = scheduler.tile_n(t) * TILE_N + scheduler.cta_rank * ROWS_PER_CTA;
    int column = scheduler.k_slice(t) * scheduler.k_blocks * BLOCK_K;
    for (int i = 0; i < scheduler.k_blocks; i++, state.advance(), column += BLOCK_K) {
      u32 full = pipeline.full(state.stage);
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, W_STAGE_BYTES);
      u32 smem = pipeline.w + state.stage * W_STAGE_BYTES +
                 scheduler.cta_rank * ROWS_PER_CTA * ROW_BYTES;
      for (int matrix = 0; matrix < MATRICES; matrix++)  // gate, then up
        tma_load<CLUSTER_M>(smem + matrix * TILE_N * ROW_BYTES, descriptor, column,
                            row + matrix * N, full, cache_policy);
    }
  }
  // No CTA exits while others may still arrive at its barriers: it waits until all have released
  // each stage for the last time. Stages that were never filled count as released.
  if (CLUSTER_M > 1)
    for (int i = 0; i < NUM_STAGES; i++, state.advance())
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
}

__device__ void produce_x(const TmaDescriptor& descriptor, const SmemPipeline& pipeline,
                          const TileScheduler& scheduler) {
  griddepcontrol_wait();
  PipelineState state;
  for (int t = scheduler.cluster; t < scheduler.work_tiles; t += scheduler.num_clusters) {
    int row = scheduler.row(t), column = scheduler.k_slice(t) * scheduler.k_blocks * BLOCK_K;
    for (int i = 0; i < scheduler.k_blocks; i++, state.advance(), column += BLOCK_K) {
      u32 full = pipeline.full(state.stage);
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, scheduler.box_rows * ROW_BYTES);
      tma_load(pipeline.x + state.stage * X_STAGE_BYTES, descriptor, column, row, full,
               EVICT_NORMAL);
    }
  }
}

// 1 / sqrt(mean(r²) + eps) of every row, from the sums of squares of the GEMM before. Two warps.
__device__ void produce_inv_rms(const float* sum_of_squares, int norm_tiles, float eps, int M,
                                int K, float* inv_rms, int thread, u32 ready) {
  griddepcontrol_wait();
  for (int row = thread; row < M; row += 64) {
    float sum = 0.f;
#pragma unroll 32
    for (int i = 0; i < norm_tiles; i++) sum += sum_of_squares[i * M + row];
    inv_rms[row] = rsqrtf(sum / K + eps);
  }
  mbarrier_arrive(ready);
}

// --- epilogue ------------------------------------------------------------------------------------

struct EpilogueArguments {
  void* out;              // [M, N] bf16; SPLIT_K_PARTIALS [split_k, M, N] float; ARGMAX [M, tiles]
  int* tile_argmax;       // [M, N tiles]
  const u32* bias;        // [N] bf16, SILU_MUL [2N]
  const u32* residual;    // [M, N] bf16
  const u32* norm_weight; // [N] bf16
  u32* norm_out;          // [M, N] bf16
  float* sum_of_squares;  // [N tiles, M]
  int M, N;
};

// Two neighbouring columns. A thread's accumulators are columns 8 j + 2 (lane % 4) and the next, of
// rows lane / 4 (half 0) and lane / 4 + 8 (half 1).
struct ColumnPair { float a, b; };

__device__ ColumnPair scale_and_bias(const float* acc, float inv_rms, const EpilogueArguments& args,
                                     int column) {
  ColumnPair pair{acc[0] * inv_rms, acc[1] * inv_rms};
  if (BIAS && column < (SILU_MUL ? 2 : 1) * args.N) {
    u32 bias = args.bias[column / 2];
    pair.a += low(bias), pair.b += high(bias);
  }
  return pair;
}

// Output columns `column` and the next, before residual and rounding.
__device__ ColumnPair output_pair(const float (&acc)[BLOCK_N / 2], int j, int half, float inv_rms,
                                  const EpilogueArguments& args, int column) {
  ColumnPair gate = scale_and_bias(acc + 4 * j + 2 * half, inv_rms, args, column);
  if (!SILU_MUL) return gate;
  ColumnPair up =
      scale_and_bias(acc + BLOCK_N / 4 + 4 * j + 2 * half, inv_rms, args, args.N + column);
  return {silu(gate.a) * up.a, silu(gate.b) * up.b};
}

// NaN is as invalid as +inf: as +inf it wins the argmax, and the reduction flags the row.
__device__ float nan_to_inf(float x) { return x == x ? x : __int_as_float(0x7f800000); }

// Each row's maximum after rounding to bfloat16, and its index; ties: the lowest index.
__device__ void argmax_epilogue(const float (&acc)[BLOCK_N / 2], const EpilogueArguments& args,
                                int m, int tile_n, const float* inv_rms) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = m + lane / 4 + 8 * half, column = tile_n * BLOCK_N + lane % 4 * 2;
    float scale = DEFERRED_NORM_IN && row < args.M ? inv_rms[row] : 1.f;
    float best = __int_as_float(0xff800000);
    int index = 0x7fffffff;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j++, column += 8) {
      ColumnPair pair = output_pair(acc, j, half, scale, args, column);
      u32 rounded = pack_bf16x2(pair.a, pair.b);
      float a = nan_to_inf(low(rounded)), b = nan_to_inf(high(rounded));
      if (column < args.N && a > best) { best = a; index = column; }
      if (column < args.N && b > best) { best = b; index = column + 1; }
    }
    for (int by = 1; by < 4; by *= 2) {
      float other = __shfl_xor_sync(~0u, best, by);
      int other_index = __shfl_xor_sync(~0u, index, by);
      if (other > best || (other == best && other_index < index)) {
        best = other;
        index = other_index;
      }
    }
    if (row < args.M && lane % 4 == 0) {
      int offset = row * ((args.N + BLOCK_N - 1) / BLOCK_N) + tile_n;
      ((float*)args.out)[offset] = best;
      args.tile_argmax[offset] = index;
    }
  }
}

// A warp's 16 rows, staged through shared memory 32 columns at a time for coalesced accesses:
// 8 threads per row, 4 columns each.
__device__ void store_epilogue(const float (&acc)[BLOCK_N / 2], const EpilogueArguments& args,
                               int m, int tile_n, int k_slice, const float* inv_rms,
                               float* staging) {
  int lane = threadIdx.x % 32;
  float scale[2], squares[4] = {};
  for (int half = 0; half < 2; half++) {
    int row = m + lane / 4 + 8 * half;
    scale[half] = DEFERRED_NORM_IN && row < args.M ? inv_rms[row] : 1.f;
  }
#pragma unroll
  for (int first = 0; first < TILE_N; first += 32) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4 && first + 8 * j < TILE_N; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int column = 8 * j + lane % 4 * 2;
        ColumnPair pair = output_pair(acc, first / 8 + j, half, scale[half], args,
                                      tile_n * TILE_N + first + column);
        *(float2*)(staging + (lane / 4 + 8 * half) * EPILOGUE_STRIDE + column) =
            make_float2(pair.a, pair.b);
      }
    __syncwarp();
    int tile_column = first + lane % 8 * 4, column = tile_n * TILE_N + tile_column;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = m + 4 * i + lane / 8;
      if (row >= args.M || column >= args.N || tile_column >= TILE_N) continue;
      float4 v = *(const float4*)(staging + (4 * i + lane / 8) * EPILOGUE_STRIDE + lane % 8 * 4);
      u64 offset = (u64)row * args.N + column;
      if (SPLIT_K_PARTIALS) {
        *(float4*)((float*)args.out + (u64)k_slice * args.M * args.N + offset) = v;
        continue;
      }
      if (RESIDUAL) {
        uint2 r = *(const uint2*)(args.residual + offset / 2);
        v.x += low(r.x), v.y += high(r.x), v.z += low(r.y), v.w += high(r.y);
      }
      uint2 rounded = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
      *(uint2*)((u32*)args.out + offset / 2) = rounded;
      if (DEFERRED_NORM_OUT) {
        uint2 weight = *(const uint2*)(args.norm_weight + column / 2);
        float a = low(rounded.x), b = high(rounded.x), c = low(rounded.y), d = high(rounded.y);
        squares[i] += a * a + b * b + c * c + d * d;
        *(uint2*)(args.norm_out + offset / 2) =
            make_uint2(pack_bf16x2(a * low(weight.x), b * high(weight.x)),
                       pack_bf16x2(c * low(weight.y), d * high(weight.y)));
      }
    }
  }
  if (DEFERRED_NORM_OUT)
    for (int i = 0; i < 4; i++) {
      float sum = squares[i];
      for (int by = 1; by < 8; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
      int row = m + 4 * i + lane / 8;
      if (row < args.M && lane % 8 == 0) args.sum_of_squares[tile_n * args.M + row] = sum;
    }
}

// --- consumer warpgroups -------------------------------------------------------------------------

// Tells the producers of all CTAs that write this CTA's W that a stage may be overwritten.
__device__ void release_stage(const SmemPipeline& pipeline, int stage) {
  int i = threadIdx.x % 128;
  if (CLUSTER_M == 1) {
    if (i == 0) mbarrier_arrive(pipeline.empty(stage));
  } else if (i < CLUSTER_M) {
    mbarrier_arrive_remote(pipeline.empty(stage), i);
  }
}

// acc = 64 rows of x times those of W, over `k_blocks` blocks of K.
__device__ void multiply(float (&acc)[BLOCK_N / 2], const SmemPipeline& pipeline,
                         PipelineState& state, int warpgroup, int k_blocks) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; i++) acc[i] = 0.f;
  int previous_stage = 0;
  for (int i = 0; i < k_blocks; i++) {
    mbarrier_wait(pipeline.full(state.stage), state.phase);
    u64 x = k_major_descriptor(pipeline.x + state.stage * X_STAGE_BYTES +
                               warpgroup * 64 * ROW_BYTES);
    u64 w = k_major_descriptor(pipeline.w + state.stage * W_STAGE_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; k++) wgmma(acc, x + 2 * k, w + 2 * k);
    wgmma_commit();
    // One block stays in flight; the one before it has been read.
    wgmma_wait<1>();
    if (i > 0) release_stage(pipeline, previous_stage);
    previous_stage = state.stage;
    state.advance();
  }
  wgmma_wait<0>();
  release_stage(pipeline, previous_stage);
  fence_registers(acc);
}

// 64 rows of every tile of this CTA.
__device__ void consume(const SmemPipeline& pipeline, const TileScheduler& scheduler,
                        const EpilogueArguments& args, int warpgroup, u32 inv_rms_ready,
                        const float* inv_rms, float* staging) {
  griddepcontrol_wait();
  PipelineState state;
  for (int t = scheduler.cluster; t < scheduler.work_tiles; t += scheduler.num_clusters) {
    float acc[BLOCK_N / 2];
    multiply(acc, pipeline, state, warpgroup, scheduler.k_blocks / K_SLICES);
    if (K_SLICES == 2) {
      float first[BLOCK_N / 2];
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; i++) first[i] = acc[i];
      multiply(acc, pipeline, state, warpgroup, scheduler.k_blocks / 2);
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; i++) acc[i] = first[i] + acc[i];
    }
    if (DEFERRED_NORM_IN) mbarrier_wait(inv_rms_ready, 0);  // late: it takes several K blocks
    int m = scheduler.row(t) + warpgroup * 64 + threadIdx.x / 32 % 4 * 16;  // the warp's rows
    if (ARGMAX) argmax_epilogue(acc, args, m, scheduler.tile_n(t), inv_rms);
    else store_epilogue(acc, args, m, scheduler.tile_n(t), scheduler.k_slice(t), inv_rms, staging);
  }
}

// --- kernel --------------------------------------------------------------------------------------

// Warp 0: produces W. Warp 1: produces x. Warps 2 and 3: 1 / rms. From warp 4: consumers.
// Shared memory: pipeline stages, epilogue staging, 1 / rms, mbarriers (full, empty, 1 / rms).
extern "C" __global__ void __cluster_dims__(CLUSTER_M, 1, 1)
__launch_bounds__(128 * (1 + CONSUMER_WARPGROUPS), 1)
gemm_sm90_kernel(const __grid_constant__ TmaDescriptor x_descriptor,
                 const __grid_constant__ TmaDescriptor w_descriptor, void* out, int* tile_argmax,
                 const u32* bias, const u32* residual, const u32* norm_weight, u32* norm_out,
                 float* sum_of_squares_out, const float* sum_of_squares, int norm_tiles, float eps,
                 int M, int N, int K, int work_tiles, int cluster_tiles_m, int split_k,
                 int k_blocks) {
  griddepcontrol_launch_dependents();
  extern __shared__ unsigned char smem[];
  u32 base = (smem_address(smem) + 1023) & ~1023u;
  float* staging = (float*)(smem + (base - smem_address(smem)) + PIPELINE_BYTES);
  float* inv_rms = staging + 4 * CONSUMER_WARPGROUPS * STAGING_FLOATS;
  u32 barriers = smem_address(inv_rms + (DEFERRED_NORM_IN ? MAX_DEFERRED_NORM_M : 0));
  u32 inv_rms_ready = barriers + 16 * NUM_STAGES;
  SmemPipeline pipeline{base, base + NUM_STAGES * X_STAGE_BYTES, barriers,
                        barriers + 8 * NUM_STAGES};
  TileScheduler scheduler{work_tiles, cluster_tiles_m, split_k, k_blocks,
                          (int)blockIdx.x / CLUSTER_M, (int)gridDim.x / CLUSTER_M,
                          (int)blockIdx.x % CLUSTER_M, max(M - BLOCK_M, 0), min(M, BLOCK_M)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < NUM_STAGES; i++) {
      mbarrier_init(pipeline.full(i), 2);  // both producers
      mbarrier_init(pipeline.empty(i), CONSUMER_WARPGROUPS * CLUSTER_M);
    }
    mbarrier_init(inv_rms_ready, 64);
    mbarrier_init_fence();
  }
  cluster_sync<CLUSTER_M>();

  int warp = threadIdx.x / 32;
  if (warp < 4) {
    if (CONSUMER_WARPGROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      if (threadIdx.x == 0) produce_w(w_descriptor, pipeline, scheduler, N);
    } else if (warp == 1) {
      if (threadIdx.x == 32) produce_x(x_descriptor, pipeline, scheduler);
    } else if (DEFERRED_NORM_IN) {
      produce_inv_rms(sum_of_squares, norm_tiles, eps, M, K, inv_rms, threadIdx.x - 64,
                      inv_rms_ready);
    }
  } else {
    if (CONSUMER_WARPGROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    EpilogueArguments args{out,      tile_argmax,        bias, residual, norm_weight,
                           norm_out, sum_of_squares_out, M,    N};
    consume(pipeline, scheduler, args, warp / 4 - 1, inv_rms_ready, inv_rms,
            staging + (warp - 4) * STAGING_FLOATS);
  }
}
