// Warp-specialized prefill attention for Hopper (sm_90a) over paged K/V, after FlashAttention-3 (Shah
// et al. 2024, arXiv 2407.08608, section 3). prefill_sm90.py explains the design, compiles and
// launches it.
//
// prefill_sm90.py puts its configuration in front of this file, as macros:
//   HEAD_DIM             64 or 128
//   BLOCK_M              rows of a tile (tokens times query heads), 64 per consumer warpgroup
//   BLOCK_N              positions of a K/V block
//   KV_STAGES            stages of the SMEM pipelines of K and of V; Q has one
//   FIXED_ORDER          1: with the bits of `fixed_order.py`
//   CONVERT, ELEMENTS    cvt to the element type, and wgmma's operand types, as asm text
// and the operands of wgmma as asm text: S = Q Kᵀ (N = BLOCK_N) and O += P V (N = HEAD_DIM):
//   S_SHAPE, S_REGISTERS, S_A, S_B, S_OUTPUTS, S_ACCUMULATORS
//   O_SHAPE, O_REGISTERS, O_A, O_B, O_ACCUMULATORS

#ifndef HEAD_DIM  // opened in an IDE: one consistent configuration
#define HEAD_DIM 64
#define BLOCK_M 128
#define BLOCK_N 16
#define KV_STAGES 2
#define FIXED_ORDER 0
#define CONVERT "cvt.rn.bf16x2.f32"
#define ELEMENTS ".f32.bf16.bf16"
#define S_SHAPE "m64n16k16"
#define S_REGISTERS "%0, %1, %2, %3, %4, %5, %6, %7"
#define S_A "%8"
#define S_B "%9"
#define S_OUTPUTS                                                                            \
  "=f"(s[0]), "=f"(s[1]), "=f"(s[2]), "=f"(s[3]), "=f"(s[4]), "=f"(s[5]), "=f"(s[6]), "=f"(s[7])
#define S_ACCUMULATORS                                                                       \
  "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7])
#define O_SHAPE "m64n64k16"
#define O_REGISTERS                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define O_A "%32, %33, %34, %35"
#define O_B "%36"
#define O_ACCUMULATORS                                                                       \
  "+f"(o[0]), "+f"(o[1]), "+f"(o[2]), "+f"(o[3]), "+f"(o[4]), "+f"(o[5]), "+f"(o[6]),        \
      "+f"(o[7]), "+f"(o[8]), "+f"(o[9]), "+f"(o[10]), "+f"(o[11]), "+f"(o[12]),             \
      "+f"(o[13]), "+f"(o[14]), "+f"(o[15]), "+f"(o[16]), "+f"(o[17]), "+f"(o[18]),          \
      "+f"(o[19]), "+f"(o[20]), "+f"(o[21]), "+f"(o[22]), "+f"(o[23]), "+f"(o[24]),          \
      "+f"(o[25]), "+f"(o[26]), "+f"(o[27]), "+f"(o[28]), "+f"(o[29]), "+f"(o[30]),          \
      "+f"(o[31])
#endif

#if FIXED_ORDER
#include "fixed_order_sm90.cuh"
static_assert(BLOCK_N == 2 * SEGMENT_BLOCK);
#else
#include "sm90.cuh"
#endif

constexpr int CONSUMER_WARPGROUPS = BLOCK_M / 64;
constexpr int ROW_BYTES = 128;        // of a tile in shared memory: 64 elements, one swizzle width
constexpr int PARTS = HEAD_DIM / 64;  // a tile is stored as PARTS tiles of 64 columns
constexpr int Q_PART_BYTES = BLOCK_M * ROW_BYTES, KV_PART_BYTES = BLOCK_N * ROW_BYTES;
constexpr int Q_BYTES = PARTS * Q_PART_BYTES, KV_STAGE_BYTES = PARTS * KV_PART_BYTES;
constexpr int CONSUMER_THREADS = 128 * CONSUMER_WARPGROUPS;

// Named barriers; 0 is __syncthreads. Warpgroup w waits for its turn at TURN_BARRIER + w.
constexpr int TURN_BARRIER = 1, CONSUMER_BARRIER = TURN_BARRIER + CONSUMER_WARPGROUPS;

struct PrefillArguments {
  u32* out;                // [T, Hq, D] bf16 or fp16, two elements per word
  const int* page_table;   // [B, page_table_stride]
  const int* start;        // [B]: position of each request's first query token
  const int4* tile_map;    // [tiles]: TileMap.entries
  int* next_work;          // tiles handed out, without each CTA's first; 0 before and after
  float qk_scale;          // of the scores, times log2(e)
  int page_table_stride, page_size;
  int box_rows;            // rows of a TMA box of K and V: divides page_size and BLOCK_N
  int kv_heads, group, tile_tokens;
  int num_work;            // tiles times kv_heads
  int causal, window;      // window: positions that a token attends to; 1 << 30: all
};

// --- wgmma ---------------------------------------------------------------------------------------

// s = 64 rows of Q times BLOCK_N rows of K, 16 deep; with ACCUMULATE s += .
template <bool ACCUMULATE>
__device__ void wgmma_qk(float (&s)[BLOCK_N / 2], u64 q, u64 k) {
  if constexpr (ACCUMULATE)
    asm volatile("wgmma.mma_async.sync.aligned." S_SHAPE ELEMENTS " {" S_REGISTERS "}, " S_A ", " S_B
                 ", 1, 1, 1, 0, 0;" : S_ACCUMULATORS : "l"(q), "l"(k));
  else
    asm volatile("wgmma.mma_async.sync.aligned." S_SHAPE ELEMENTS " {" S_REGISTERS "}, " S_A ", " S_B
                 ", 0, 1, 1, 0, 0;" : S_OUTPUTS : "l"(q), "l"(k));
}

// o += 64 rows of P, of which a thread has `p[0..3]`, times HEAD_DIM columns of V, 16 deep.
__device__ void wgmma_pv(float (&o)[HEAD_DIM / 2], const u32* p, u64 v) {
  asm volatile("wgmma.mma_async.sync.aligned." O_SHAPE ELEMENTS " {" O_REGISTERS "}, {" O_A "}, " O_B
               ", 1, 1, 1, 1;"
               : O_ACCUMULATORS : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

// Keeps ptxas from moving a wait for wgmma ahead of what computes `x`, which is not negative: a
// branch that depends on it and is never taken. `volatile` and "memory" order asm statements among
// each other, not with the arithmetic between them.
__device__ void keep_before_wait(float x) {
  if (x < 0.f) asm volatile("nanosleep.u32 0;");
}

__device__ u32 pack(float low, float high) {
  u32 packed;
  asm(CONVERT " %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// --- work tiles and SMEM pipelines ---------------------------------------------------------------

// A tile of one K/V head, found by the producer and passed to the consumers in shared memory.
// tokens = 0: there are no more tiles.
struct alignas(16) Tile {
  int tokens, row;             // tokens, the first of which is `row` of the batch
  int position;                // of the first token
  int kv_head;
  int begin_block, end_block;  // K/V blocks, at multiples of BLOCK_N; at least one
  int low, high;               // K/V outside [low, high) may be another request's, or NaN
  int request;
  // The i-th to be computed: the masked ones of the diagonal come first, but in a fixed order last.
  __device__ int block(int i) const { return FIXED_ORDER ? begin_block + i : end_block - 1 - i; }
  __device__ int blocks() const { return end_block - begin_block; }
};

__device__ Tile find_tile(const PrefillArguments& args, int work) {
  Tile tile;
  tile.kv_head = work % args.kv_heads;
  int4 entry = args.tile_map[work / args.kv_heads];
  int start = args.start[entry.x], count = entry.z, first = entry.w;
  tile.request = entry.x;
  tile.row = entry.y + first;
  tile.tokens = min(args.tile_tokens, count - first);
  tile.position = start + first;
  tile.low = max(start - args.window + args.causal, 0);
  tile.high = start + count;
  int low = args.causal ? max(tile.position - args.window + 1, 0) : tile.low;
  int high = args.causal ? tile.position + tile.tokens : tile.high;
  tile.begin_block = low / BLOCK_N;
  tile.end_block = (high + BLOCK_N - 1) / BLOCK_N;
  return tile;
}

// Shared-memory addresses. full: the operand has arrived; empty: the consumers have read it.
template <int STAGES, int STAGE_BYTES>
struct SmemPipeline {
  u32 data, barriers;
  __device__ u32 stage(int i) const { return data + i * STAGE_BYTES; }
  __device__ u32 full(int i) const { return barriers + 8 * i; }
  __device__ u32 empty(int i) const { return barriers + 8 * (STAGES + i); }
  __device__ void init() const {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(full(i), 1);
      mbarrier_init(empty(i), CONSUMER_WARPGROUPS);
    }
  }
};
using QPipeline = SmemPipeline<1, Q_BYTES>;
using KvPipeline = SmemPipeline<KV_STAGES, KV_STAGE_BYTES>;

struct Pipelines {
  QPipeline q;
  KvPipeline k, v;
  Tile* tile;  // that q is of: written before q is full, read before q is empty
};

template <int STAGES>
struct PipelineState {
  int stage = 0, phase = 0;
  __device__ void advance() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
};

// --- producer warp -------------------------------------------------------------------------------

// Lane i loads the i-th box of every K/V block: `boxes` boxes within one page each.
struct KvLoader {
  const TmaDescriptor &k_descriptor, &v_descriptor;
  const Pipelines& pipelines;
  int box_rows, boxes, lane;
  PipelineState<KV_STAGES> k_state, v_state;

  // The pool row where this lane's box of a block begins. Boxes outside the request get the rows of
  // a page inside, so that no page id is read from outside the table.
  __device__ int pool_row(const PrefillArguments& args, const Tile& tile, int block) const {
    int position = block * BLOCK_N + min(lane, boxes - 1) * box_rows;
    int page = position / args.page_size, offset = position - page * args.page_size;
    page = max(min(page, (tile.high - 1) / args.page_size), tile.low / args.page_size);
    const int* table = args.page_table + (u64)tile.request * args.page_table_stride;
    return table[page] * args.page_size + offset;
  }
  __device__ void load(const TmaDescriptor& descriptor, const KvPipeline& pipeline,
                       PipelineState<KV_STAGES>& state, int kv_head, int row) {
    u32 full = pipeline.full(state.stage);
    mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
    if (lane == 0) mbarrier_arrive_expect_tx(full, KV_STAGE_BYTES);
    __syncwarp();
    u32 smem = pipeline.stage(state.stage) + lane * box_rows * ROW_BYTES;
    if (lane < boxes)
      for (int part = 0; part < PARTS; part++)
        tma_load(smem + part * KV_PART_BYTES, descriptor, kv_head * HEAD_DIM + part * 64, row,
                 full, EVICT_NORMAL);
    state.advance();
  }
  __device__ void load_k(const Tile& tile, int row) {
    load(k_descriptor, pipelines.k, k_state, tile.kv_head, row);
  }
  __device__ void load_v(const Tile& tile, int row) {
    load(v_descriptor, pipelines.v, v_state, tile.kv_head, row);
  }
};

__device__ void produce(const TmaDescriptor& q_descriptor, const TmaDescriptor& k_descriptor,
                        const TmaDescriptor& v_descriptor, const Pipelines& pipelines,
                        const PrefillArguments& args) {
  int lane = threadIdx.x % 32;
  KvLoader loader{k_descriptor, v_descriptor, pipelines, args.box_rows, BLOCK_N / args.box_rows,
                  lane};
  PipelineState<1> q_state;
  int work = blockIdx.x;
  while (work < args.num_work) {
    // Requested early. Every tile is followed by one increment, so the counter wraps around to 0
    // after the last.
    int next = 0;
    if (lane == 0) next = gridDim.x + atomicInc((u32*)args.next_work, args.num_work - 1);
    Tile tile = find_tile(args, work);
    int row = loader.pool_row(args, tile, tile.block(0));
    loader.load_k(tile, row);
    if (lane == 0) {
      u32 full = pipelines.q.full(0), smem = pipelines.q.stage(0);
      mbarrier_wait(pipelines.q.empty(0), q_state.phase ^ 1);
      *pipelines.tile = tile;
      mbarrier_arrive_expect_tx(full, args.tile_tokens * args.group * PARTS * ROW_BYTES);
      for (int part = 0; part < PARTS; part++)
        tma_load(smem + part * Q_PART_BYTES, q_descriptor, part * 64, tile.kv_head * args.group,
                 tile.row, full, EVICT_FIRST);
    }
    q_state.advance();
    __syncwarp();
    for (int i = 1; i < tile.blocks(); i++) {  // K one block ahead of V, as they are consumed
      int next_row = loader.pool_row(args, tile, tile.block(i));
      loader.load_k(tile, next_row);
      loader.load_v(tile, row);
      row = next_row;
    }
    loader.load_v(tile, row);
    work = __shfl_sync(~0u, next, 0);
  }
  if (lane == 0) {
    mbarrier_wait(pipelines.q.empty(0), q_state.phase ^ 1);
    pipelines.tile->tokens = 0;
    mbarrier_arrive(pipelines.q.full(0));
  }
  griddepcontrol_launch_dependents();
}

// --- consumer warpgroups -------------------------------------------------------------------------

// Of a thread's two rows: lane / 4 (half 0) and lane / 4 + 8 (half 1) of the warp's 16 rows. In all
// accumulators, x[4 j + 2 half + e] is column 8 j + 2 (lane % 4) + e.
struct Rows {
  int begin[2], end[2];  // positions that a row attends to
};

// The GEMMs of the warpgroups alternate (ping-pong scheduling, section 3.1): while one computes its
// softmax, the other has the tensor cores.
__device__ void wait_for_turn(int warpgroup) {
  named_barrier_sync(TURN_BARRIER + warpgroup, 256);
}

__device__ void pass_turn(int warpgroup) {
  named_barrier_arrive(TURN_BARRIER + (warpgroup + 1) % CONSUMER_WARPGROUPS, 256);
}

// After a wgmma that a warpgroup has waited for: its four warps have started it together, so what
// each of them read before it has been read.
__device__ void release(u32 empty_barrier) {
  if (threadIdx.x % 128 == 0) mbarrier_arrive(empty_barrier);
}

// Starts s = Q Kᵀ.
__device__ void start_qk(float (&s)[BLOCK_N / 2], u64 q, u32 k_stage) {
  u64 k = k_major_descriptor(k_stage);
  wgmma_fence();
  wgmma_qk<false>(s, q, k);
#pragma unroll
  for (int i = 1; i < HEAD_DIM / 16; i++)
    wgmma_qk<true>(s, q + i / 4 * (Q_PART_BYTES >> 4) + i % 4 * 2,
                   k + i / 4 * (KV_PART_BYTES >> 4) + i % 4 * 2);
  wgmma_commit();
}

// Starts o += P V. The accumulator layout of S is the register layout of A.
template <int COUNT>
__device__ void start_pv(float (&o)[HEAD_DIM / 2], const u32 (&p)[COUNT], u32 v_stage) {
  u64 v = mn_major_descriptor(v_stage, KV_PART_BYTES);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < COUNT / 4; i++) wgmma_pv(o, p + 4 * i, v + i * (16 * ROW_BYTES >> 4));
  wgmma_commit();
}

__device__ void mask_scores(float (&s)[BLOCK_N / 2], const Rows& rows, int first) {
  int column = first + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int begin = rows.begin[half] - column, end = rows.end[half] - column;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        bool visible = 8 * j + e >= begin && 8 * j + e < end;
        float& x = s[4 * j + 2 * half + e];
        x = visible ? x : __int_as_float(0xff800000);
      }
  }
}

#if !FIXED_ORDER
// The online softmax of a thread's two rows.
struct Softmax {
  float max[2] = {-1e38f, -1e38f};  // in powers of two; finite: its difference to itself is 0
  float sum[2] = {0.f, 0.f};        // of this thread's columns

  // s: scores -> weights. factor: what earlier weights are multiplied by.
  __device__ void step(float (&s)[BLOCK_N / 2], float qk_scale, float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float row_max = fmaxf(max[half], largest_of_row(s, half) * qk_scale);
      factor[half] = exp2_approx(max[half] - row_max);
      max[half] = row_max;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float a = 0.f, b = 0.f;
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; j++) {
        float &x = s[4 * j + 2 * half], &y = s[4 * j + 2 * half + 1];
        x = exp2_approx(fmaf(x, qk_scale, -max[half]));
        y = exp2_approx(fmaf(y, qk_scale, -max[half]));
        a += x, b += y;
      }
      sum[half] = sum[half] * factor[half] + (a + b);
    }
  }

  // What makes outputs of a row's weighted values: the inverse of the sum of its weights.
  __device__ float normalizer(int half) const {
    float all = sum[half] + __shfl_xor_sync(~0u, sum[half], 1);
    return 1.f / (all + __shfl_xor_sync(~0u, all, 2));
  }
  __device__ static float normalized(float x, float inverse) { return x * inverse; }
};

template <int COUNT>
__device__ void rescale(float (&o)[COUNT], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) o[i] *= factor[i / 2 % 2];
}
#endif

template <int COUNT>
__device__ void pack_weights(u32 (&p)[COUNT], const float (&s)[2 * COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ bool is_outside(const Tile& tile, int block) {
  return block * BLOCK_N < tile.low || (block + 1) * BLOCK_N > tile.high;
}

// Zeros the rows of V outside [low, high): a weight of 0 times NaN is NaN. All consumers.
__device__ void zero_outside(u32 v_stage, const Tile& tile, int block) {
  constexpr int CHUNKS = ROW_BYTES / 16 * BLOCK_N * PARTS;
  for (int i = threadIdx.x - 128; i < CHUNKS; i += CONSUMER_THREADS) {
    int position = block * BLOCK_N + i / (ROW_BYTES / 16) % BLOCK_N;
    if (position < tile.low || position >= tile.high)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v_stage + 16 * i), "r"(0)
                   : "memory");
  }
  fence_proxy_async();
  named_barrier_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
}

// 4 x 4 words among the 4 lanes of a row: lane i gets the i-th word of lanes 0 to 3.
__device__ void transpose_quad(u32 (&x)[4]) {
  bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    u32 other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    x[i] = odd ? other : x[i];
    x[i + 1] = odd ? x[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + 2], 2);
    x[i] = upper ? other : x[i];
    x[i + 2] = upper ? x[i + 2] : other;
  }
}

// out_row: token times query heads plus head.
__device__ void store_row(const float (&o)[HEAD_DIM / 2], int half, const Softmax& softmax, u32* out,
                          u64 out_row, bool inside) {
  int lane = threadIdx.x % 32;
  float normalizer = softmax.normalizer(half);
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 8; j += 4) {  // 32 columns: 8 consecutive ones for each lane
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      x[i] = pack(Softmax::normalized(o[4 * (j + i) + 2 * half], normalizer),
                  Softmax::normalized(o[4 * (j + i) + 2 * half + 1], normalizer));
    transpose_quad(x);
    if (inside)
      *(uint4*)(out + (out_row * HEAD_DIM + 8 * (j + lane % 4)) / 2) =
          make_uint4(x[0], x[1], x[2], x[3]);
  }
}

__device__ void store_output(const float (&o)[HEAD_DIM / 2], const Softmax& softmax,
                             const Tile& tile, const PrefillArguments& args, int first_row) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = first_row + lane / 4 + 8 * half, token = row / args.group;
    bool inside = token < tile.tokens;
    u64 out_row = (u64)(tile.row + token) * (args.kv_heads * args.group) +
                  tile.kv_head * args.group + row % args.group;
    store_row(o, half, softmax, args.out, out_row, inside);
  }
}

struct ConsumerState {
  PipelineState<1> q;
  PipelineState<KV_STAGES> k, v;
};

#if FIXED_ORDER
#include "prefill_fixed_order_sm90.cuh"
#else

// What a warpgroup computes of 64 rows.
struct Output {
  Softmax softmax;
  float o[HEAD_DIM / 2];
  __device__ Output() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.f;
  }
  __device__ void store(const Tile& tile, const PrefillArguments& args, int first_row) const {
    store_output(o, softmax, tile, args, first_row);
  }
};

// 64 rows of a tile. Q Kᵀ of a block is issued before P V of the one before it, so that P V runs
// during the softmax (intra-warpgroup pipelining, section 3.2).
__device__ void attend(Output& out, const Rows& rows, const Tile& tile, u64 q,
                       const Pipelines& pipelines, ConsumerState& state,
                       const PrefillArguments& args, int warpgroup) {
  // Blocks within [clear, full) need no mask.
  int full = args.causal ? tile.position + 1 : tile.high;
  int clear = args.causal ? tile.position + tile.tokens - args.window : tile.low;
  float s[BLOCK_N / 2], factor[2];
  u32 p[BLOCK_N / 4];
  int block = tile.block(0);

  mbarrier_wait(pipelines.k.full(state.k.stage), state.k.phase);
  start_qk(s, q, pipelines.k.stage(state.k.stage));
  wgmma_wait<0>();
  fence_registers(s);
  release(pipelines.k.empty(state.k.stage));
  state.k.advance();
  if ((block + 1) * BLOCK_N > full || block * BLOCK_N < clear)
    mask_scores(s, rows, block * BLOCK_N);
  out.softmax.step(s, args.qk_scale, factor);
  pack_weights(p, s);
  if (is_outside(tile, block)) {
    mbarrier_wait(pipelines.v.full(state.v.stage), state.v.phase);
    zero_outside(pipelines.v.stage(state.v.stage), tile, block);
  }

  for (int i = 1; i < tile.blocks(); i++) {
    block = tile.block(i);
    mbarrier_wait(pipelines.k.full(state.k.stage), state.k.phase);
    wait_for_turn(warpgroup);
    start_qk(s, q, pipelines.k.stage(state.k.stage));
    mbarrier_wait(pipelines.v.full(state.v.stage), state.v.phase);
    start_pv(out.o, p, pipelines.v.stage(state.v.stage));
    pass_turn(warpgroup);
    wgmma_wait<1>();
    fence_registers(s);
    release(pipelines.k.empty(state.k.stage));
    state.k.advance();
    if ((block + 1) * BLOCK_N > full || block * BLOCK_N < clear)
      mask_scores(s, rows, block * BLOCK_N);
    out.softmax.step(s, args.qk_scale, factor);
    keep_before_wait(out.softmax.sum[0] + out.softmax.sum[1]);
    wgmma_wait<0>();
    fence_registers(out.o);
    release(pipelines.v.empty(state.v.stage));
    state.v.advance();
    pack_weights(p, s);
    rescale(out.o, factor);
  }
  release(pipelines.q.empty(0));

  // Zeroed already, if it was also the first.
  if (tile.blocks() > 1 && is_outside(tile, block)) {
    mbarrier_wait(pipelines.v.full(state.v.stage), state.v.phase);
    zero_outside(pipelines.v.stage(state.v.stage), tile, block);
  }
  mbarrier_wait(pipelines.v.full(state.v.stage), state.v.phase);
  start_pv(out.o, p, pipelines.v.stage(state.v.stage));
  wgmma_wait<0>();
  fence_registers(out.o);
  release(pipelines.v.empty(state.v.stage));
  state.v.advance();
}

#endif

__device__ void consume(const Pipelines& pipelines, const PrefillArguments& args, int warpgroup) {
  ConsumerState state;
  int first_row = warpgroup * 64 + threadIdx.x / 32 % 4 * 16;  // of the warp's 16 rows
  // Warpgroup 0 has the first turn.
  if (!FIXED_ORDER && warpgroup == CONSUMER_WARPGROUPS - 1) pass_turn(warpgroup);
  for (;; state.q.advance()) {
    mbarrier_wait(pipelines.q.full(0), state.q.phase);
    Tile tile = *pipelines.tile;
    if (tile.tokens == 0) break;
    Output out;
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int token = (first_row + threadIdx.x % 32 / 4 + 8 * half) / args.group;
      rows.end[half] = args.causal ? tile.position + token + 1 : tile.high;
      rows.begin[half] = args.causal ? rows.end[half] - args.window : tile.low;
    }
    u64 q = k_major_descriptor(pipelines.q.stage(0) + warpgroup * 64 * ROW_BYTES);
    attend(out, rows, tile, q, pipelines, state, args, warpgroup);
    out.store(tile, args, first_row);
  }
}

// --- kernel --------------------------------------------------------------------------------------

// Warp 0: producer. From warp 4: consumers. Warps 1 to 3 are idle: registers are reallocated by
// whole warpgroups, from the producer's to the consumers'.
// Shared memory: Q, K, V, the tile, their mbarriers.
extern "C" __global__ void __launch_bounds__(128 + CONSUMER_THREADS, 1)
prefill_sm90_kernel(const __grid_constant__ TmaDescriptor q_descriptor,
                    const __grid_constant__ TmaDescriptor k_descriptor,
                    const __grid_constant__ TmaDescriptor v_descriptor, u32* out,
                    const int* page_table, const int* start, const int4* tile_map, int* next_work,
                    float qk_scale, int page_table_stride, int page_size, int box_rows,
                    int kv_heads, int group, int tile_tokens, int num_work, int causal,
                    int window) {
  extern __shared__ unsigned char smem[];
  u32 offset = (1024 - smem_address(smem) % 1024) % 1024, base = smem_address(smem) + offset;
  constexpr int V_OFFSET = Q_BYTES + KV_STAGES * KV_STAGE_BYTES;
  constexpr int TILE_OFFSET = V_OFFSET + KV_STAGES * KV_STAGE_BYTES;
  u32 barriers = base + TILE_OFFSET + sizeof(Tile);
  Pipelines pipelines{{base, barriers},
                      {base + Q_BYTES, barriers + 16},
                      {base + V_OFFSET, barriers + 16 * (1 + KV_STAGES)},
                      (Tile*)(smem + offset + TILE_OFFSET)};
  PrefillArguments args{out,       page_table, start,  tile_map,    next_work,
                        qk_scale,  page_table_stride,  page_size,   box_rows,
                        kv_heads,  group,      tile_tokens,         num_work,
                        causal,    window};
  if (threadIdx.x == 0) {
    pipelines.q.init();
    pipelines.k.init();
    pipelines.v.init();
    mbarrier_init_fence();
  }
  __syncthreads();
  griddepcontrol_wait();

  int warp = threadIdx.x / 32;
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) produce(q_descriptor, k_descriptor, v_descriptor, pipelines, args);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(pipelines, args, __shfl_sync(~0u, warp / 4 - 1, 0));
  }
}
