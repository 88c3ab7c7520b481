// The experts of a mixture of experts for up to 128 tokens on Hopper (sm_90a): both grouped GEMMs
// in one persistent, warp-specialized kernel. experts_sm90.py explains the design, compiles and
// launches it.
//
// experts_sm90.py puts its configuration in front of this file, as macros:
//   BLOCK_K      columns of a pipeline stage, a multiple of 64
//   NUM_STAGES   stages of the SMEM pipeline
//   CTAS_PER_SM  of the grid
//   DYNAMIC      CTAs claim work tiles one by one, so that faster ones compute more of them
//   EXPERT_H, EXPERT_I, EXPERT_TOP_K  hidden size, width of an expert, experts of a token; constants,
//                because divisions by them are on the way to the first load
//   FP8          W is e4m3 (BLOCK_K is 128 then), with scales of rows; 2: of rows and 128 columns
//   CHOOSE       every CTA chooses the experts of up to 4 tokens from the router's logits; then also
//                NUM_EXPERTS, TOP_K, NUM_SHARED, NUM_GROUPS and more of router_sm90.cu's

#ifndef BLOCK_K  // opened in an IDE: one consistent configuration
#define BLOCK_K 128
#define NUM_STAGES 8
#define CTAS_PER_SM 1
#define DYNAMIC 0
#define EXPERT_H 2048
#define EXPERT_I 768
#define EXPERT_TOP_K 8
#define FP8 0
#define CHOOSE 0
#endif

#include "expert_tiles.cuh"
#include "sm90.cuh"
#if CHOOSE
#include "top_k.cuh"
#endif

constexpr int BLOCK_M = 16;     // most pairs of an expert's tile; N of wgmma
constexpr int BLOCK_N = 64;     // rows of W; M of wgmma
constexpr int ROW_BYTES = 128;  // of a tile in shared memory: 64 columns, the width of the swizzle
constexpr int CHUNKS = BLOCK_K / 64;
constexpr int W_CHUNKS = FP8 ? CHUNKS / 2 : CHUNKS;  // a row of e4m3 has 128 columns in one tile
constexpr int W_CHUNK_BYTES = BLOCK_N * ROW_BYTES, X_CHUNK_BYTES = BLOCK_M * ROW_BYTES;
constexpr int W_STAGE_BYTES = W_CHUNKS * W_CHUNK_BYTES, X_STAGE_BYTES = CHUNKS * X_CHUNK_BYTES;
constexpr int SCALES_STAGE_BYTES = FP8 == 2 ? BLOCK_N * 4 : 0;  // of the rows of W
static_assert(!FP8 || BLOCK_K == 128, "a group of columns");

// Warp 0 loads W, warps 1 and 2 load x or act; from warp 4: two consumer warpgroups.
constexpr int X_PRODUCERS = 64, CONSUMER_WARPGROUPS = 2, THREADS = 128 * (1 + CONSUMER_WARPGROUPS);
constexpr int X_PRODUCER_BARRIER = 1, CONSUMER_BARRIER = 2;  // named barriers
static_assert(!DYNAMIC || NUM_STAGES + 6 < QUEUE, "a slot is read before it is written again");

// --- TMA descriptors, shared memory --------------------------------------------------------------

// Fetches a descriptor ahead of its first load.
__device__ void prefetch_descriptor(const TmaDescriptor& descriptor) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&descriptor) : "memory");
}

__device__ float load_shared(u32 smem) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem) : "memory");
  return value;
}

// --- arguments and tile scheduler ----------------------------------------------------------------

struct Arguments {
  const u16* x;          // [T, H] bf16
  u16* act;              // [T * k, I] bf16
  float* out;            // [k, T, H]
  const float* weights;  // [T, k]
  const float* scales13;  // FP8: [E, G, 2I], of rows of w13: G is 1, or H / 128
  const float* scales2;   // [E, G, H]
  const int* pairs;
  int* progress;         // zero before and after: CTAs that wait for act no more; claims of work
                         // tiles; for each expert tile, work tiles of gate/up that are done
  int T;
  static constexpr int H = EXPERT_H, I = EXPERT_I, top_k = EXPERT_TOP_K;
};

// An expert tile by BLOCK_N rows of its expert's weight. tile < 0: there are no more.
struct WorkTile { int tile, block_n; bool down; };

// Static persistent scheduler: CTA c computes work tiles c, c + num_ctas, ... of gate/up, then its
// share of down. Where gate/up does not divide evenly, some CTAs have one work tile more, and are
// busy for longer; the others, idle then, start with H / I work tiles of down, about as much time.
struct TileScheduler {
  static constexpr int H = EXPERT_H, I = EXPERT_I;
  static constexpr int gate_up_blocks = 2 * I / BLOCK_N, down_blocks = H / BLOCK_N;  // a tile's
  int num_tiles;            // expert tiles
  int cta, num_ctas, idle;  // idle: number of such CTAs
  int gate_up_count, lead;  // this CTA's work tiles of gate/up; of down, to start with
  int lead_tiles;           // of all idle CTAs
  int rank;                 // this CTA's place in down: idle CTAs come first

  __device__ TileScheduler(int num_tiles, int cta, int num_ctas)
      : num_tiles(num_tiles), cta(cta), num_ctas(num_ctas) {
    int gate_up = num_tiles * gate_up_blocks, busy = gate_up % num_ctas;
    gate_up_count = gate_up / num_ctas + (cta < busy);
    idle = num_ctas - busy;
    lead = cta < busy ? 0 : H / I;
    lead_tiles = idle * (H / I);
    rank = cta < busy ? idle + cta : cta - busy;
  }

  // All of gate/up, then all of down. The longer ones come first, and down waits only for work tiles
  // that some CTA has claimed before.
  __device__ WorkTile from_index(int index) const {
    int gate_up = num_tiles * gate_up_blocks;
    if (index < gate_up) return {index / gate_up_blocks, index % gate_up_blocks, false};
    index -= gate_up;
    if (index >= num_tiles * down_blocks) return {-1, 0, true};
    return {index / down_blocks, index % down_blocks, true};
  }

  __device__ WorkTile work_tile(int i) const {  // the i-th of this CTA
    if (i < gate_up_count) {
      int index = cta + i * num_ctas;
      return {index / gate_up_blocks, index % gate_up_blocks, false};
    }
    i -= gate_up_count;
    int index = rank + (i < lead ? i * idle : lead_tiles + (i - lead) * num_ctas);
    if (index >= num_tiles * down_blocks) return {-1, 0, true};
    return {index / down_blocks, index % down_blocks, true};
  }
};

// --- SMEM pipeline -------------------------------------------------------------------------------

// Shared-memory addresses. full: W and x have arrived; empty: they have been read. order: the other
// consumer warpgroup waits for no more stages of the work tile before.
struct SmemPipeline {
  u32 w, x, scales, full_barriers, empty_barriers, order_barriers;
  __device__ u32 full(int stage) const { return full_barriers + 8 * stage; }
  __device__ u32 empty(int stage) const { return empty_barriers + 8 * stage; }
  __device__ u32 order(int warpgroup) const { return order_barriers + 8 * warpgroup; }
};

// The stage that is next, and the parity of its `full` barrier; that of `empty` is the other one.
struct PipelineState {
  int stage = 0, phase = 0;
  __device__ void advance(int stages = 1) {
    for (stage += stages; stage >= NUM_STAGES; stage -= NUM_STAGES) phase ^= 1;
  }
};

// What all roles share.
struct Context {
  Arguments args;
  TileScheduler scheduler;
  SmemPipeline pipeline;
  const ExpertTile* tiles;
  ClaimQueue queue;
  __device__ WorkTile work_tile(int i) const {  // the i-th of this CTA
    return DYNAMIC ? scheduler.from_index(queue.get(i)) : scheduler.work_tile(i);
  }
  __device__ int k_blocks(const WorkTile& work) const {
    return (work.down ? args.I : args.H) / BLOCK_K;
  }
};

// --- producers -----------------------------------------------------------------------------------

// One thread. In gate/up 8 rows of gate and 8 of up alternate, so that both accumulators of an
// element of act are in the same thread.
__device__ void produce_w(const Context& context, const TmaDescriptor& w13,
                          const TmaDescriptor& w2) {
  const SmemPipeline& pipeline = context.pipeline;
  PipelineState state;
  int claimed = context.scheduler.cta, next = 0;  // the first one is not claimed
  for (int i = 0;; i++, claimed = next) {
    WorkTile work;
    if (DYNAMIC) {
      context.queue.put(i, claimed);
      work = context.scheduler.from_index(claimed);
    } else {
      work = context.scheduler.work_tile(i);
    }
    if (work.tile < 0) return;
    if (DYNAMIC)  // its result arrives while this work tile is loaded
      next = context.scheduler.num_ctas + atomicAdd(context.args.progress + 1, 1);
    ExpertTile tile = context.tiles[work.tile];
    // Read once, unless the expert has another tile.
    u64 cache_policy = tile.rows < BLOCK_M ? EVICT_FIRST : EVICT_NORMAL;
    int k_blocks = context.k_blocks(work), column = 0;
    for (int k = 0; k < k_blocks; k++, state.advance()) {
      u32 full = pipeline.full(state.stage), smem = pipeline.w + state.stage * W_STAGE_BYTES;
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, W_STAGE_BYTES);
#pragma unroll
      for (int chunk = 0; chunk < W_CHUNKS; chunk++, column += 64, smem += W_CHUNK_BYTES) {
        if (work.down)
          tma_load(smem, w2, column, tile.expert * context.args.H + work.block_n * BLOCK_N, full,
                   cache_policy);
        else
          tma_load_4d(smem, w13, column, 0, 2 * tile.expert, work.block_n * (BLOCK_N / 16), full,
                      cache_policy);
      }
    }
  }
}

// FP8: of the first rows of a work tile and the first group of columns.
__device__ const float* scales_of(const Arguments& args, const WorkTile& work, int expert) {
  int groups = FP8 == 1 ? 1 : (work.down ? args.I : args.H) / BLOCK_K;
  u64 rows = (u64)expert * groups * (work.down ? args.H : 2 * args.I);
  return (work.down ? args.scales2 : args.scales13) + rows +
         work.block_n * (work.down ? BLOCK_N : BLOCK_N / 2);
}

// Gathers an expert tile's rows of x, or of act, swizzled as TMA does it. A thread copies one
// 16-byte vector of every ROW_STEP-th row. Rows beyond the tile's are left as they are: a column of
// wgmma's B affects the same column of the result only.
__device__ void produce_x(const Context& context, int thread) {
  constexpr int VECTORS = BLOCK_K / 8, ROW_STEP = X_PRODUCERS / VECTORS, ROWS = BLOCK_M / ROW_STEP;
  static_assert(X_PRODUCERS % VECTORS == 0 && BLOCK_M % ROW_STEP == 0, "rows of a thread");
  const SmemPipeline& pipeline = context.pipeline;
  const Arguments& args = context.args;
  int vector = thread % VECTORS, first_row = thread / VECTORS;
  u32 chunk = pipeline.x + vector / 8 * X_CHUNK_BYTES;
  PipelineState state;
  for (int i = 0;; i++) {
    WorkTile work = context.work_tile(i);
    if (work.tile < 0) break;
    ExpertTile tile = context.tiles[work.tile];
    const u16* source[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      int row = first_row + r * ROW_STEP, pair = row < tile.rows ? args.pairs[tile.first + row] : 0;
      source[r] = (work.down ? args.act + (u64)pair * args.I
                             : args.x + (u64)(pair / args.top_k) * args.H) + vector * 8;
    }
    const float* scales = scales_of(args, work, tile.expert) + thread % 16 * 4;
    if (!work.down && thread % 16 >= 8) scales += args.I - 32;  // after 32 rows of gate those of up
    if (work.down)
      wait_for_act(args.progress, work.tile, context.scheduler.gate_up_blocks, thread,
                   X_PRODUCER_BARRIER, X_PRODUCERS);
    int k_blocks = context.k_blocks(work);
    for (int k = 0; k < k_blocks; k++, state.advance()) {
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        int row = first_row + r * ROW_STEP;
        if (row < tile.rows)
          cp_async_16(chunk + state.stage * X_STAGE_BYTES + row * ROW_BYTES +
                          (vector % 8 ^ row % 8) * 16,
                      source[r]);
        source[r] += BLOCK_K;
      }
      if (FP8 == 2 && thread < 16) {
        cp_async_16(pipeline.scales + state.stage * SCALES_STAGE_BYTES + thread * 16, scales);
        scales += work.down ? args.H : 2 * args.I;
      }
      cp_async_arrive(pipeline.full(state.stage));
    }
  }
  if (thread == 0) reset_progress(args.progress, context.scheduler.num_tiles);
}

// --- consumer warpgroups -------------------------------------------------------------------------

// acc += 64 rows of W times 16 rows of x, 16 deep.
#if FP8
__device__ void wgmma(float (&acc)[BLOCK_M / 2], const u32 (&w)[4], u64 x_descriptor) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]),
        "+f"(acc[6]), "+f"(acc[7])
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x_descriptor));
}
#else
__device__ void wgmma(float (&acc)[BLOCK_M / 2], u64 w_descriptor, u64 x_descriptor) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]),
        "+f"(acc[6]), "+f"(acc[7])
      : "l"(w_descriptor), "l"(x_descriptor));
}
#endif

// A thread's pairs: columns 8 j + 2 (lane % 4) and the next of the accumulators, at 2 j, 2 j + 1.
struct ThreadPairs {
  int pair[BLOCK_M / 4];  // -1: none
  float weight[BLOCK_M / 4];
  __device__ ThreadPairs(const ExpertTile& tile, const Arguments& args, bool weighted) {
#pragma unroll
    for (int i = 0; i < BLOCK_M / 4; i++) {
      int column = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      pair[i] = column < tile.rows ? args.pairs[tile.first + column] : -1;
    }
#pragma unroll
    for (int i = 0; i < BLOCK_M / 4; i++)
      weight[i] = weighted && pair[i] >= 0 ? args.weights[pair[i]] : 0.f;
  }
};

#if FP8
// The rows of a work tile that a thread has in its accumulators: of gate and of up, or 8 apart.
struct ThreadRows {
  int first, other;
  float scales[2];  // FP8 == 1
  __device__ ThreadRows(const Arguments& args, const WorkTile& work, int expert) {
    int warp = threadIdx.x / 32 % 4, row = threadIdx.x % 32 / 4;
    first = (work.down ? 16 : 8) * warp + row;
    other = first + (work.down ? 8 : BLOCK_N / 2);
    if (FP8 == 1) {
      const float* of_rows = scales_of(args, work, expert);
      scales[0] = of_rows[first];
      scales[1] = of_rows[work.down ? other : first + args.I];
    }
  }
};

// acc += 64 columns of a stage; w: the bytes of both rows, as `interleave` orders them.
__device__ void multiply(float (&acc)[BLOCK_M / 2], u32 (&fragments)[4][4], const uint4 (&w)[2],
                         u32 x_smem) {
  decode_e4m3(fragments, w);
  u64 x = k_major_descriptor(x_smem);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) wgmma(acc, fragments[k], x + 2 * k);
  wgmma_commit();
}

// sum = the work tile's rows of W times the expert tile's rows of x.
__device__ void mainloop(float (&sum)[BLOCK_M / 2], const SmemPipeline& pipeline,
                         PipelineState& state, int k_blocks, int other_warpgroup,
                         const ThreadRows& rows) {
  bool first_thread = threadIdx.x % 128 == 0;
  float acc[BLOCK_M / 2];
  u32 fragments[2][4][4];  // of both halves of a stage: one is converted while one is multiplied
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, previous_stage = 0;
  u32 chunk = (u32)((lane % 4 * 2) ^ (lane / 4)) << 4;  // swizzled
#pragma unroll
  for (int i = 0; i < BLOCK_M / 2; i++) acc[i] = sum[i] = 0.f;
  for (int k = 0; k < k_blocks; k++, state.advance()) {
    mbarrier_wait(pipeline.full(state.stage), state.phase);
    fence_proxy_async();  // x was written by cp.async
    u32 x = pipeline.x + state.stage * X_STAGE_BYTES;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 w[2];
#pragma unroll
      for (int i = 0; i < 2; i++)
        w[i] = load_shared_16(pipeline.w + state.stage * W_STAGE_BYTES + (row + 8 * i) * ROW_BYTES +
                              (chunk ^ half * 16));
      multiply(acc, fragments[half], w, x + half * X_CHUNK_BYTES);
      wgmma_wait<1>();  // this half stays in flight; the one before has been read
      if (half == 0 && k > 0 && lane == 0) mbarrier_arrive(pipeline.empty(previous_stage));
    }
    previous_stage = state.stage;
    if (FP8 == 2) {
      u32 stage = pipeline.scales + state.stage * SCALES_STAGE_BYTES;
      float scale[2] = {load_shared(stage + 4 * rows.first), load_shared(stage + 4 * rows.other)};
      wgmma_wait<0>();
      fence_registers(acc);
#pragma unroll
      for (int i = 0; i < BLOCK_M / 2; i++) sum[i] += acc[i] * scale[i / 2 % 2], acc[i] = 0.f;
    }
  }
  if (first_thread) mbarrier_arrive(pipeline.order(other_warpgroup));
  wgmma_wait<0>();
  fence_registers(acc);
  if (lane == 0) mbarrier_arrive(pipeline.empty(previous_stage));
  if (FP8 == 1)
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i++) sum[i] = acc[i] * rows.scales[i / 2 % 2];
}
#else
// acc = the work tile's rows of W times the expert tile's rows of x.
__device__ void mainloop(float (&acc)[BLOCK_M / 2], const SmemPipeline& pipeline,
                         PipelineState& state, int k_blocks, int other_warpgroup) {
  bool first_thread = threadIdx.x % 128 == 0;
  int previous_stage = 0;
#pragma unroll
  for (int i = 0; i < BLOCK_M / 2; i++) acc[i] = 0.f;
  for (int k = 0; k < k_blocks; k++, state.advance()) {
    mbarrier_wait(pipeline.full(state.stage), state.phase);
    fence_proxy_async();  // x was written by cp.async
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      u64 w = k_major_descriptor(pipeline.w + state.stage * W_STAGE_BYTES + chunk * W_CHUNK_BYTES);
      u64 x = k_major_descriptor(pipeline.x + state.stage * X_STAGE_BYTES + chunk * X_CHUNK_BYTES);
#pragma unroll
      for (int step = 0; step < 4; step++) wgmma(acc, w + 2 * step, x + 2 * step);
    }
    wgmma_commit();
    wgmma_wait<1>();  // this stage stays in flight; the one before it has been read
    if (k > 0 && first_thread) mbarrier_arrive(pipeline.empty(previous_stage));
    previous_stage = state.stage;
  }
  if (first_thread) mbarrier_arrive(pipeline.order(other_warpgroup));
  wgmma_wait<0>();
  if (first_thread) mbarrier_arrive(pipeline.empty(previous_stage));
  fence_registers(acc);
}
#endif

// act = SiLU(gate) * up, both rounded before, as the output of a GEMM is. Of a warp's 16 rows, the
// first 8 are gate and the last 8 up.
__device__ void store_act(const float (&acc)[BLOCK_M / 2], const Arguments& args,
                          const ThreadPairs& pairs, int block_n) {
  int column = block_n * (BLOCK_N / 2) + threadIdx.x / 32 % 4 * 8 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < BLOCK_M / 4; i++) {
    if (pairs.pair[i] < 0) continue;
    float gate = round_bf16(acc[i / 2 * 4 + i % 2]), up = round_bf16(acc[i / 2 * 4 + i % 2 + 2]);
    args.act[(u64)pairs.pair[i] * args.I + column] = to_bf16(gate * sigmoid(gate) * up);
  }
}

// out = rounded as the output of a GEMM is, times the pair's weight.
__device__ void store_out(const float (&acc)[BLOCK_M / 2], const Arguments& args,
                          const ThreadPairs& pairs, int block_n) {
  int first = block_n * BLOCK_N + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < BLOCK_M / 4; i++) {
    int pair = pairs.pair[i];
    if (pair < 0) continue;
    int token = pair / args.top_k, choice = pair % args.top_k;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int column = first + 8 * half;
      float value = round_bf16(acc[i / 2 * 4 + i % 2 + 2 * half]) * pairs.weight[i];
      args.out[((u64)choice * args.T + token) * args.H + column] = value;
    }
  }
}

// Tells the CTAs that wait for this expert tile's act that one more block of it is written. All
// threads of the warpgroup.
__device__ void signal_act(const Context& context, int tile, int warpgroup) {
  if (warpgroup == 0) named_barrier_sync(CONSUMER_BARRIER, 128);
  else named_barrier_sync(CONSUMER_BARRIER + 1, 128);
  if (threadIdx.x % 128 == 0) add_release(context.args.progress + 2 + tile, 1);
}

// Every second work tile of this CTA (ping-pong): while one warpgroup stores, the other multiplies.
// They run their main loops in order: one that waited for a stage before the other has seen its
// previous contents would take these for its own, since a barrier tells only even phases from odd.
__device__ void consume(const Context& context, int warpgroup) {
  PipelineState state;
  for (int i = 0;; i++) {
    WorkTile work = context.work_tile(i);
    if (work.tile < 0) return;
    int k_blocks = context.k_blocks(work);
    if (i % CONSUMER_WARPGROUPS != warpgroup) {
      state.advance(k_blocks);
      continue;
    }
#if FP8
    ThreadRows rows(context.args, work, context.tiles[work.tile].expert);
#else
    ThreadPairs pairs(context.tiles[work.tile], context.args, work.down);
#endif
    mbarrier_wait(context.pipeline.order(warpgroup), i / 2 % 2 ^ (warpgroup == 0));
    float acc[BLOCK_M / 2];
#if FP8
    mainloop(acc, context.pipeline, state, k_blocks, 1 - warpgroup, rows);
    // Not before the main loop, for want of registers; the other warpgroup multiplies meanwhile.
    ThreadPairs pairs(context.tiles[work.tile], context.args, work.down);
#else
    mainloop(acc, context.pipeline, state, k_blocks, 1 - warpgroup);
#endif
    if (work.down) {
      store_out(acc, context.args, pairs, work.block_n);
    } else {
      store_act(acc, context.args, pairs, work.block_n);
      signal_act(context, work.tile, warpgroup);
    }
  }
}

// --- choice of experts, for few tokens -----------------------------------------------------------

#if CHOOSE
constexpr int CHOICES = TOP_K + NUM_SHARED;
constexpr int MAX_FEW_TOKENS = 4, MAX_FEW_PAIRS = 32;  // a lane each
constexpr int LOGITS_ROW = (NUM_EXPERTS + 7) / 8 * 8;
static_assert(CHOICES == EXPERT_TOP_K, "all of them are experts of the kernel");
static_assert(NUM_GROUPS == 1 && CHOICES * MAX_FEW_TOKENS <= MAX_FEW_PAIRS, "few choices");

// In shared memory. Pair token * CHOICES + choice.
struct Choices {
  int experts[MAX_FEW_PAIRS];
  float weights[MAX_FEW_PAIRS];
  int pairs[MAX_FEW_PAIRS * MAX_FEW_TOKENS];  // each expert's pairs, at the place of the first
  float scores[MAX_FEW_TOKENS][32 * LANE_EXPERTS];
  int used;
};

// A lane's keys, best first, with their experts.
__device__ void sort_keys(u32 (&keys)[LANE_EXPERTS], int (&ids)[LANE_EXPERTS]) {
#pragma unroll
  for (int last = LANE_EXPERTS - 1; last > 0; last--)
#pragma unroll
    for (int j = 0; j < last; j++) {
      bool swap = keys[j] < keys[j + 1];  // not of equals: the lowest expert comes first
      u32 key = keys[j];
      int id = ids[j];
      keys[j] = swap ? keys[j + 1] : key, keys[j + 1] = swap ? key : keys[j + 1];
      ids[j] = swap ? ids[j + 1] : id, ids[j + 1] = swap ? id : ids[j + 1];
    }
}

// The experts of a token, best first. If two lanes have equal keys, expert by expert.
__device__ void top_k(const float (&scores)[LANE_EXPERTS], const float (&bias)[LANE_EXPERTS],
                      int* experts, int lane) {
  u32 keys[LANE_EXPERTS], sorted[LANE_EXPERTS], equals = 0;
  int ids[LANE_EXPERTS];
  to_keys(keys, scores, bias, lane);
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) sorted[j] = keys[j], ids[j] = lane + 32 * j;
  sort_keys(sorted, ids);
#pragma unroll
  for (int i = 0; i < TOP_K; i++) {
    bool best = sorted[0] == __reduce_max_sync(ALL_LANES, sorted[0]);
    u32 lanes = __ballot_sync(ALL_LANES, best);
    equals |= lanes & (lanes - 1);
    if (best) experts[i] = ids[0];
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) {
      sorted[j] = best ? (j + 1 < LANE_EXPERTS ? sorted[j + 1] : USED) : sorted[j];
      ids[j] = best && j + 1 < LANE_EXPERTS ? ids[j + 1] : ids[j];
    }
  }
  if (equals == 0) return;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < TOP_K; i++) {
    u32 key;
    int expert = find_best(keys, lane, key);
    mark_used(keys, expert, lane);
    if (lane == 0) experts[i] = expert;
  }
}

// Experts and weights of a token, with the arithmetic of the router's kernel. One warp.
__device__ void choose_experts(const float* logits, const float (&bias)[LANE_EXPERTS], float factor,
                               int token, int lane, Choices& choices) {
  float scores[LANE_EXPERTS];
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) {
    int expert = lane + 32 * j;
    scores[j] = __uint_as_float(0xff800000);
    if (!is_expert(expert)) continue;
    float logit = logits[token * LOGITS_ROW + expert];
    scores[j] = ROUND_LOGITS ? low(pack_bf16x2(logit, 0.f)) : logit;
  }
  to_scores(scores);
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) choices.scores[token][lane + 32 * j] = scores[j];
  int* experts = choices.experts + token * CHOICES;
  top_k(scores, bias, experts, lane);
  __syncwarp();
  float weight = 1.f, score = lane < TOP_K ? choices.scores[token][experts[lane]] : 0.f, total = 0.f;
#pragma unroll
  for (int i = 0; i < TOP_K; i++) total += __shfl_sync(ALL_LANES, score, i);
  if (lane < TOP_K) {
    weight = score;
    if (NORM) weight /= total + NORM_EPS;
    weight *= factor;
  } else if (lane < CHOICES) {
    experts[lane] = NUM_EXPERTS + lane - TOP_K;
  }
  if (lane < CHOICES) choices.weights[token * CHOICES + lane] = weight;
}

// The experts' pairs, in order of tokens, and tiles. One warp. Returns how many tiles.
__device__ int list_experts(Choices& choices, ExpertTile* list, int T, int lane) {
  bool valid = lane < T * CHOICES;
  int expert = valid ? choices.experts[lane] : -1 - lane;
  u32 same = T == 1 ? 1u << lane : __match_any_sync(ALL_LANES, expert);
  int first = __ffs(same) - 1;
  u32 firsts = __ballot_sync(ALL_LANES, valid && first == lane);
  if (valid) {
    choices.pairs[first * MAX_FEW_TOKENS + __popc(same & ((1u << lane) - 1))] = lane;
    if (first == lane)
      list[__popc(firsts & ((1u << lane) - 1))] =
          ExpertTile{(short)expert, (short)__popc(same), lane * MAX_FEW_TOKENS};
  }
  return __popc(firsts);
}

// All threads of the CTA. Returns how many tiles there are.
__device__ int choose_all(const float* logits, const float (&bias)[LANE_EXPERTS], float factor, int T,
                          Choices& choices, ExpertTile* list) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < T) choose_experts(logits, bias, factor, warp, lane, choices);
  if (T > 1) __syncthreads();
  if (warp == 0) {
    __syncwarp();
    int used = list_experts(choices, list, T, lane);
    if (lane == 0) choices.used = used;
  }
  __syncthreads();
  return choices.used;
}
#endif

// --- kernel --------------------------------------------------------------------------------------

// Shared memory: pipeline stages, mbarriers (full, empty, order, DYNAMIC: claims), DYNAMIC: claimed
// work tiles, max_tiles expert tiles. All CTAs must fit on the GPU at once, since they wait for each
// other's act.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
experts_sm90_kernel(const __grid_constant__ TmaDescriptor w13,
                    const __grid_constant__ TmaDescriptor w2, const u16* x, u16* act, float* out,
                    const float* scales13, const float* scales2, const float* weights,
                    const int* pairs, const int* tiles, int* progress, const float* logits,
                    const float* correction_bias, float factor, int max_tiles, int T) {
  griddepcontrol_launch_dependents();  // takes effect when all CTAs have started
  extern __shared__ unsigned char smem[];
  u32 base = (smem_address(smem) + 1023) & ~1023u;
  u32 scales = base + NUM_STAGES * (W_STAGE_BYTES + X_STAGE_BYTES);
  u32 barriers = scales + NUM_STAGES * SCALES_STAGE_BYTES;
  SmemPipeline pipeline{base, base + NUM_STAGES * W_STAGE_BYTES, scales, barriers,
                        barriers + 8 * NUM_STAGES, barriers + 16 * NUM_STAGES};
  u32 claims = pipeline.order(CONSUMER_WARPGROUPS);
  int* claimed = (int*)(smem + (claims + (DYNAMIC ? 8 * QUEUE : 0) - smem_address(smem)));
  ExpertTile* list = (ExpertTile*)(claimed + (DYNAMIC ? QUEUE : 0));
  if (threadIdx.x == 0) {
    for (int i = 0; i < NUM_STAGES; i++) {
      mbarrier_init(pipeline.full(i), 1 + X_PRODUCERS);
      mbarrier_init(pipeline.empty(i), FP8 ? 4 : 1);  // warps read W, or wgmma does
    }
    for (int i = 0; i < CONSUMER_WARPGROUPS; i++) mbarrier_init(pipeline.order(i), 1);
    if (DYNAMIC)
      for (int i = 0; i < QUEUE; i++) mbarrier_init(claims + 8 * i, 1);
    mbarrier_init_fence();
    prefetch_descriptor(w13);
    prefetch_descriptor(w2);
  }
#if CHOOSE
  __shared__ Choices choices;
  float bias[LANE_EXPERTS];
  load_bias(bias, correction_bias, threadIdx.x % 32);
  griddepcontrol_wait();
  int used = choose_all(logits, bias, factor, T, choices, list);
  weights = choices.weights, pairs = choices.pairs;
#else
  griddepcontrol_wait();
  int used = load_tiles<THREADS>(list, tiles, max_tiles);
#endif

  Context context{{x, act, out, weights, scales13, scales2, pairs, progress, T},
                  TileScheduler(used, (int)blockIdx.x, (int)gridDim.x), pipeline, list,
                  {claims, claimed}};
  int warp = threadIdx.x / 32;
  if (warp == 0) {
    if (threadIdx.x == 0) produce_w(context, w13, w2);
  } else if (warp == 1 || warp == 2) {
    produce_x(context, threadIdx.x - 32);
  } else if (warp >= 4) {
    consume(context, warp / 4 - 1);
  }
}
