// GEMM of few tokens with an e4m3 weight for Hopper (sm_90a): out = epilogue(x Wᵀ), with x [M, K] in
// bfloat16 and W [N, K] in e4m3. gemm_fp8_sm90.py explains the design, compiles and launches it.
//
// gemm_fp8_sm90.py puts its configuration in front of this file, as macros:
//   BLOCK_M              tokens, all of them: 8, 16, 32, 64 or 128
//   ROW_GROUPS           warpgroups along N; each computes 64 rows of W
//   K_GROUPS             1 or 2 warpgroups that take turns at the blocks of K, for each 64 rows
//   NUM_STAGES           stages of the SMEM pipeline
// what is multiplied, 0 or 1:
//   GROUPED              W has scales for every 128 columns, not for whole rows
// and the epilogue's steps, 0 or 1, as in gemm_sm90.cu:
//   SILU_MUL, SPLIT_K_PARTIALS, DEFERRED_NORM_IN, RESIDUAL, DEFERRED_NORM_OUT, BIAS
// and the operands of wgmma as asm text:
//   WGMMA_SHAPE, WGMMA_ACC, WGMMA_W, WGMMA_X, WGMMA_ACC_OPERANDS

#ifndef BLOCK_M  // opened in an IDE: one consistent configuration
#define BLOCK_M 16
#define ROW_GROUPS 1
#define K_GROUPS 2
#define NUM_STAGES 8
#define GROUPED 0
#define SILU_MUL 0
#define SPLIT_K_PARTIALS 0
#define DEFERRED_NORM_IN 0
#define RESIDUAL 0
#define DEFERRED_NORM_OUT 0
#define BIAS 0
#define WGMMA_SHAPE "m64n16k16"
#define WGMMA_ACC "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_W "%8, %9, %10, %11"
#define WGMMA_X "%12"
#define WGMMA_ACC_OPERANDS                                                            \
  "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), \
      "+f"(acc[6]), "+f"(acc[7])
#endif

#include "sm90.cuh"

constexpr int TILE_ROWS = 64 * ROW_GROUPS;                   // rows of W
constexpr int TILE_N = SILU_MUL ? TILE_ROWS / 2 : TILE_ROWS;  // output columns
constexpr int BLOCK_K = 128;    // a row of W is 128 bytes, one of x 2 times 128: two tiles of 64
constexpr int ROW_BYTES = 128;  // of a tile in shared memory, the width of the swizzle
constexpr int W_STAGE_BYTES = TILE_ROWS * ROW_BYTES, X_TILE_BYTES = BLOCK_M * ROW_BYTES;
constexpr int STAGE_BYTES = W_STAGE_BYTES + 2 * X_TILE_BYTES;
constexpr int NUM_ACC = BLOCK_M / 2;  // accumulators of a thread
constexpr int CONSUMERS = 128 * ROW_GROUPS * K_GROUPS;
constexpr int STAGING_STRIDE = TILE_N + 4;  // floats per token, without bank conflicts
constexpr int STAGING_FLOATS = BLOCK_M * STAGING_STRIDE;
constexpr int EXCHANGE_FLOATS = K_GROUPS > 1 ? NUM_ACC * 128 * ROW_GROUPS : 0;
constexpr int BUFFER_FLOATS = STAGING_FLOATS > EXCHANGE_FLOATS ? STAGING_FLOATS : EXCHANGE_FLOATS;

// --- arithmetic ----------------------------------------------------------------------------------

// acc += 64 rows of W, 16 deep, from registers, times BLOCK_M rows of x.
__device__ void wgmma(float (&acc)[NUM_ACC], const u32 (&w)[4], u64 x_descriptor) {
  asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.bf16.bf16 {" WGMMA_ACC "}, {" WGMMA_W
               "}, " WGMMA_X ", 1, 1, 1, 0;"
               : WGMMA_ACC_OPERANDS
               : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x_descriptor));
}

__device__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// --- tile scheduler and SMEM pipeline ------------------------------------------------------------

// CTA c computes work tiles c, c + gridDim.x, ...: `split_k` slices of K of a tile, then the next.
struct TileScheduler {
  int work_tiles, split_k, k_blocks;  // k_blocks: of one slice of K
  __device__ int tile_n(int work_tile) const { return work_tile / split_k; }
  __device__ int k_slice(int work_tile) const { return work_tile % split_k; }
};

// Shared-memory addresses. full: W and x have arrived; empty: the consumers have read them.
struct SmemPipeline {
  u32 stages, full_barriers, empty_barriers;
  __device__ u32 w(int stage) const { return stages + stage * STAGE_BYTES; }
  __device__ u32 x(int stage) const { return w(stage) + W_STAGE_BYTES; }
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

// The descriptor's elements are pairs of e4m3 numbers.
__device__ void produce_w(const TmaDescriptor& descriptor, const SmemPipeline& pipeline,
                          const TileScheduler& scheduler, int N) {
  PipelineState state;
  for (int t = blockIdx.x; t < scheduler.work_tiles; t += gridDim.x) {
    int row = scheduler.tile_n(t) * TILE_N;
    int column = scheduler.k_slice(t) * scheduler.k_blocks * BLOCK_K;
    for (int i = 0; i < scheduler.k_blocks; i++, state.advance(), column += BLOCK_K) {
      u32 full = pipeline.full(state.stage);
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, W_STAGE_BYTES);
      for (int matrix = 0; matrix < 1 + SILU_MUL; matrix++)  // gate, then up
        tma_load(pipeline.w(state.stage) + matrix * TILE_N * ROW_BYTES, descriptor, column / 2,
                 row + matrix * N, full, EVICT_FIRST);
    }
  }
}

__device__ void produce_x(const TmaDescriptor& descriptor, const SmemPipeline& pipeline,
                          const TileScheduler& scheduler, int M) {
  griddepcontrol_wait();
  int box_rows = min(M, BLOCK_M);
  PipelineState state;
  for (int t = blockIdx.x; t < scheduler.work_tiles; t += gridDim.x) {
    int column = scheduler.k_slice(t) * scheduler.k_blocks * BLOCK_K;
    for (int i = 0; i < scheduler.k_blocks; i++, state.advance(), column += BLOCK_K) {
      u32 full = pipeline.full(state.stage);
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, 2 * box_rows * ROW_BYTES);
      for (int half = 0; half < 2; half++)
        tma_load(pipeline.x(state.stage) + half * X_TILE_BYTES, descriptor, column + 64 * half, 0,
                 full, EVICT_NORMAL);
    }
  }
}

// 1 / sqrt(mean(r²) + eps) of every token, from the sums of squares of the GEMM before. Two warps.
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

// --- consumer warpgroups -------------------------------------------------------------------------

struct EpilogueArguments {
  void* out;                // [M, N] bf16; SPLIT_K_PARTIALS [split_k, M, N] float
  const float* scales;      // [N] or GROUPED [N, K / 128], of rows of W; SILU_MUL [2N]
  const u16* bias;          // [N] bf16, SILU_MUL [2N]
  const u32* residual;      // [M, N] bf16
  const u32* norm_weight;   // [N] bf16
  u32* norm_out;            // [M, N] bf16
  float* sum_of_squares;    // [N tiles, M]
  int M, N, K;
};

// A consumer thread, and its place in a tile. Its accumulators are tokens 8 j + 2 (lane % 4) and the
// next, of two rows of W (half 0 and 1), 8 rows apart, or gate and up of the same output.
struct Consumer {
  int row_group, k_group, lane, column;  // column: of the output, within the tile; of half 0
  __device__ Consumer(int thread)
      : row_group(thread / 128 % ROW_GROUPS), k_group(thread / 128 / ROW_GROUPS),
        lane(thread % 32) {
    int warp = thread / 32 % 4;
    column = row_group * (SILU_MUL ? 32 : 64) + warp * (SILU_MUL ? 8 : 16) + lane / 4;
  }
  __device__ int smem_row(int half) const {
    return column + half * (SILU_MUL ? TILE_N : 8);
  }
  // Row of W, clamped: rows past the end are computed and not stored.
  __device__ int w_row(int tile_n, int half, int N) const {
    int n = tile_n * TILE_N + column + (SILU_MUL ? 0 : 8 * half);
    return min(n, N - 1) + (SILU_MUL ? half * N : 0);
  }
};

// acc += 64 columns of a block, `half` of it. w: the bytes of both rows.
__device__ void multiply(float (&acc)[NUM_ACC], u32 (&fragments)[4][4], const uint4 (&w)[2],
                         u32 x_smem) {
  decode_e4m3(fragments, w);
  u64 x = k_major_descriptor(x_smem);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) wgmma(acc, fragments[k], x + 2 * k);
  wgmma_commit();
}

// This warpgroup's part of the product of a tile.
__device__ void accumulate(float (&sum)[NUM_ACC], const SmemPipeline& pipeline,
                           PipelineState& state, const Consumer& me, const TileScheduler& scheduler,
                           int work_tile, const EpilogueArguments& args) {
  float acc[NUM_ACC];
  u32 fragments[2][4][4];  // of both halves of a block: one is converted while one is multiplied
#pragma unroll
  for (int i = 0; i < NUM_ACC; i++) acc[i] = sum[i] = 0.f;
  const float* scales[2];
  for (int half = 0; half < 2; half++)
    scales[half] = args.scales + (u64)me.w_row(scheduler.tile_n(work_tile), half, args.N) *
                                     (args.K / BLOCK_K) +
                   scheduler.k_slice(work_tile) * scheduler.k_blocks;
  u32 chunk = (u32)((me.lane % 4 * 2) ^ (me.lane / 4)) << 4;  // swizzled
  int previous_stage = -1;
  for (int i = 0; i < scheduler.k_blocks; i++, state.advance()) {
    if (K_GROUPS > 1 && i % K_GROUPS != me.k_group) continue;
    float block_scale[2];
    if (GROUPED)
      for (int half = 0; half < 2; half++) block_scale[half] = scales[half][i];
    mbarrier_wait(pipeline.full(state.stage), state.phase);
    uint4 w[2][2];  // half of the block, row
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int row = 0; row < 2; row++)
        w[half][row] = load_shared_16(pipeline.w(state.stage) + me.smem_row(row) * ROW_BYTES +
                                      (chunk ^ half * 16));
    u32 x = pipeline.x(state.stage);
    multiply(acc, fragments[0], w[0], x);
    wgmma_wait<1>();  // the first half stays in flight; the block before has been read
    if (me.lane == 0 && previous_stage >= 0) mbarrier_arrive(pipeline.empty(previous_stage));
    multiply(acc, fragments[1], w[1], x + X_TILE_BYTES);
    wgmma_wait<1>();
    previous_stage = state.stage;
    if (GROUPED) {
      wgmma_wait<0>();
      fence_registers(acc);
#pragma unroll
      for (int j = 0; j < NUM_ACC; j++) {
        sum[j] += acc[j] * block_scale[j / 2 % 2];
        acc[j] = 0.f;
      }
    }
  }
  wgmma_wait<0>();
  fence_registers(acc);
  if (me.lane == 0 && previous_stage >= 0) mbarrier_arrive(pipeline.empty(previous_stage));
  if (!GROUPED)
#pragma unroll
    for (int i = 0; i < NUM_ACC; i++) sum[i] = acc[i];
}

// Sums of both K groups -> those of the first, in one order.
__device__ void add_k_groups(float (&sum)[NUM_ACC], const Consumer& me, float* buffer) {
  float* mine = buffer + me.row_group * NUM_ACC * 128 + threadIdx.x % 128;
  if (me.k_group == 1)
#pragma unroll
    for (int i = 0; i < NUM_ACC; i++) mine[i * 128] = sum[i];
  named_barrier_sync(1, CONSUMERS);
  if (me.k_group == 0) {
#pragma unroll
    for (int i = 0; i < NUM_ACC; i++) sum[i] += mine[i * 128];
    named_barrier_sync(2, 128 * ROW_GROUPS);  // all have read before one writes
  }
}

// Scales, 1 / rms, bias and SiLU-mul of a thread's sums, to buffer [token][column].
__device__ void stage_outputs(const float (&sum)[NUM_ACC], const Consumer& me, int tile_n,
                              const EpilogueArguments& args, const float* inv_rms, float* buffer) {
  float scale[2], bias[2];
  for (int half = 0; half < 2; half++) {
    int row = me.w_row(tile_n, half, args.N);
    scale[half] = GROUPED ? 1.f : args.scales[row];
    bias[half] = BIAS ? low(args.bias[row]) : 0.f;
  }
#pragma unroll
  for (int j = 0; j < NUM_ACC / 4; j++)
#pragma unroll
    for (int next = 0; next < 2; next++) {
      int token = 8 * j + me.lane % 4 * 2 + next;
      float factor = DEFERRED_NORM_IN && token < args.M ? inv_rms[token] : 1.f;
      float a = sum[4 * j + next] * scale[0] * factor + bias[0];
      float b = sum[4 * j + 2 + next] * scale[1] * factor + bias[1];
      float* out = buffer + token * STAGING_STRIDE + me.column;
      if (SILU_MUL) {
        out[0] = silu(a) * b;
      } else {
        out[0] = a;
        out[8] = b;
      }
    }
}

// From buffer [token][column] to global memory: a warp per token, 4 columns per lane.
__device__ void store_outputs(const EpilogueArguments& args, int tile_n, int k_slice, int thread,
                              const float* buffer) {
  int lane = thread % 32;
#pragma unroll 4
  for (int token = thread / 32; token < args.M; token += CONSUMERS / 32) {
    float squares = 0.f;
    for (int tile_column = 4 * lane; tile_column < TILE_N; tile_column += 128) {
      int column = tile_n * TILE_N + tile_column;
      if (column >= args.N) break;
      float4 v = *(const float4*)(buffer + token * STAGING_STRIDE + tile_column);
      u64 offset = (u64)token * args.N + column;
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
        squares += a * a + b * b + c * c + d * d;
        *(uint2*)(args.norm_out + offset / 2) =
            make_uint2(pack_bf16x2(a * low(weight.x), b * high(weight.x)),
                       pack_bf16x2(c * low(weight.y), d * high(weight.y)));
      }
    }
    if (DEFERRED_NORM_OUT) {
      for (int by = 1; by < 32; by *= 2) squares += __shfl_xor_sync(~0u, squares, by);
      if (lane == 0) args.sum_of_squares[tile_n * args.M + token] = squares;
    }
  }
}

__device__ void consume(const SmemPipeline& pipeline, const TileScheduler& scheduler,
                        const EpilogueArguments& args, int thread, u32 inv_rms_ready,
                        const float* inv_rms, float* buffer) {
  griddepcontrol_wait();
  Consumer me(thread);
  PipelineState state;
  for (int t = blockIdx.x; t < scheduler.work_tiles; t += gridDim.x) {
    float sum[NUM_ACC];
    accumulate(sum, pipeline, state, me, scheduler, t, args);
    if (DEFERRED_NORM_IN) mbarrier_wait(inv_rms_ready, 0);  // late: it takes several K blocks
    if (K_GROUPS > 1) add_k_groups(sum, me, buffer);
    if (me.k_group == 0) stage_outputs(sum, me, scheduler.tile_n(t), args, inv_rms, buffer);
    named_barrier_sync(1, CONSUMERS);
    store_outputs(args, scheduler.tile_n(t), scheduler.k_slice(t), thread, buffer);
    named_barrier_sync(1, CONSUMERS);
  }
}

// --- kernel --------------------------------------------------------------------------------------

// Warp 0: produces W. Warp 1: produces x. Warps 2 and 3: 1 / rms. From warp 4: consumers.
// Shared memory: pipeline stages, the epilogue's buffer, 1 / rms, mbarriers (full, empty, 1 / rms).
extern "C" __global__ void __launch_bounds__(128 + CONSUMERS, 1)
gemm_fp8_sm90_kernel(const __grid_constant__ TmaDescriptor x_descriptor,
                     const __grid_constant__ TmaDescriptor w_descriptor, void* out,
                     const float* scales, const u16* bias, const u32* residual,
                     const u32* norm_weight, u32* norm_out, float* sum_of_squares_out,
                     const float* sum_of_squares, int norm_tiles, float eps, int M, int N, int K,
                     int work_tiles, int split_k, int k_blocks) {
  griddepcontrol_launch_dependents();
  extern __shared__ unsigned char smem[];
  u32 base = (smem_address(smem) + 1023) & ~1023u;
  float* buffer = (float*)(smem + (base - smem_address(smem)) + NUM_STAGES * STAGE_BYTES);
  float* inv_rms = buffer + BUFFER_FLOATS;
  u32 barriers = smem_address(inv_rms + BLOCK_M);
  u32 inv_rms_ready = barriers + 16 * NUM_STAGES;
  SmemPipeline pipeline{base, barriers, barriers + 8 * NUM_STAGES};
  TileScheduler scheduler{work_tiles, split_k, k_blocks};
  if (threadIdx.x == 0) {
    for (int i = 0; i < NUM_STAGES; i++) {
      mbarrier_init(pipeline.full(i), 2);  // both producers
      mbarrier_init(pipeline.empty(i), 4 * ROW_GROUPS);  // warps that read it
    }
    mbarrier_init(inv_rms_ready, 64);
    mbarrier_init_fence();
  }
  __syncthreads();

  int warp = threadIdx.x / 32;
  if (warp < 4) {
    if (CONSUMERS >= 256) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      if (threadIdx.x == 0) produce_w(w_descriptor, pipeline, scheduler, N);
    } else if (warp == 1) {
      if (threadIdx.x == 32) produce_x(x_descriptor, pipeline, scheduler, M);
    } else if (DEFERRED_NORM_IN) {
      produce_inv_rms(sum_of_squares, norm_tiles, eps, M, K, inv_rms, threadIdx.x - 64,
                      inv_rms_ready);
    }
  } else {
    if (CONSUMERS == 256) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (CONSUMERS == 384) asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    EpilogueArguments args{out,      scales,             bias, residual, norm_weight,
                           norm_out, sum_of_squares_out, M,    N,        K};
    consume(pipeline, scheduler, args, threadIdx.x - 128, inv_rms_ready, inv_rms, buffer);
  }
}
