// The experts of gpt-oss in MXFP4 for up to 128 tokens on Hopper (sm_90a): both grouped GEMMs in one
// persistent, warp-specialized kernel. experts_mxfp4_sm90.py explains the design, compiles and
// launches it; experts_mxfp4.py has the layout of W.
//
// experts_mxfp4_sm90.py puts its configuration in front of this file, as macros:
//   BLOCK_M     most pairs of an expert's tile, 8 or 16
//   ROW_BLOCKS  blocks of 16 rows of W per warp
//   NUM_STAGES  stages of the SMEM pipeline
//   EXPERT_H, EXPERT_I, EXPERT_TOP_K  hidden size, width of an expert, experts of a token
//   ALPHA, LIMIT  of the clamped SwiGLU

#ifndef ROW_BLOCKS  // opened in an IDE: one consistent configuration
#define BLOCK_M 16
#define ROW_BLOCKS 2
#define NUM_STAGES 5
#define EXPERT_H 2880
#define EXPERT_I 2880
#define EXPERT_TOP_K 4
#define ALPHA 1.702f
#define LIMIT 7.0f
#endif

#include "expert_tiles.cuh"
#include "sm90.cuh"

constexpr int H = EXPERT_H, I = EXPERT_I, TOP_K = EXPERT_TOP_K;
constexpr int CHUNK = 64;                         // columns of a warp in a stage: 32 bytes of W
constexpr int K_WARPS = 8, ROW_WARPS = 2;         // chunks of a stage; warps along the rows of W
constexpr int BLOCKS = ROW_BLOCKS * ROW_WARPS, BLOCK_N = 16 * BLOCKS;  // rows of W
constexpr int M_BLOCKS = BLOCK_M / 8;             // of 8 pairs
constexpr int FRAGMENTS = M_BLOCKS * BLOCKS;      // 16 rows by 8 pairs
constexpr int BOX_CHUNKS = 4, BOX_BYTES = BLOCK_N * 128;  // TMA's: 128 bytes of each row
constexpr int W_STAGE_BYTES = K_WARPS / BOX_CHUNKS * BOX_BYTES;
constexpr int X_PITCH = K_WARPS * CHUNK * 2 + 64; // bytes of a row of x: no bank conflicts
constexpr int X_STAGE_BYTES = BLOCK_M * X_PITCH;
constexpr int SCALES_STAGE_BYTES = K_WARPS * BLOCK_N * 2;
constexpr int SUMS_BYTES = FRAGMENTS * K_WARPS * 512;  // of the warps along K
constexpr int GATE_UP_TILES = 2 * I / BLOCK_N, DOWN_TILES = H / BLOCK_N;  // work tiles of an expert's
static_assert(2 * I % BLOCK_N == 0 && H % BLOCK_N == 0 && H % CHUNK == 0 && I % CHUNK == 0, "whole");

// Warp 0 loads W and scales, warps 1 and 2 load x or act; from warp 3: consumers.
constexpr int X_PRODUCERS = 64, FIRST_CONSUMER = 3, CONSUMER_WARPS = K_WARPS * ROW_WARPS;
constexpr int CONSUMERS = 32 * CONSUMER_WARPS, THREADS = 32 * FIRST_CONSUMER + CONSUMERS;
constexpr int X_PRODUCER_BARRIER = 1, CONSUMER_BARRIER = 2;  // named barriers
static_assert(FRAGMENTS <= CONSUMER_WARPS, "a warp adds up one");
static_assert(NUM_STAGES + 6 < QUEUE, "a slot is read before it is written again");

// --- arguments, work tiles, pipeline -------------------------------------------------------------

struct Arguments {
  const u16* x;          // [T, H] bf16
  u16* act;              // [T * k, I] bf16
  float* out;            // [k, T, H]
  const u16* b13;        // [E, 2I] bf16
  const u16* b2;         // [E, H]
  const float* weights;  // [T, k]
  const int* pairs;
  int* progress;         // as experts_sm90.cu's: CTAs that wait for act no more; claims of work
                         // tiles; for each expert tile, fragments of gate/up that are stored
  int T;
};

// An expert tile by BLOCK_N rows of its expert's weight, of gate/up half of them of gate. tile < 0:
// there are no more.
struct WorkTile {
  int tile, block;
  bool down;
  __device__ int chunks() const { return (down ? I : H) / CHUNK; }
  __device__ int stages() const { return (chunks() + K_WARPS - 1) / K_WARPS; }
};

// Shared-memory addresses. full: W, scales and x have arrived; empty: they have been read.
struct Pipeline {
  u32 w, x, scales, full_barriers, empty_barriers;
  __device__ u32 full(int stage) const { return full_barriers + 8 * stage; }
  __device__ u32 empty(int stage) const { return empty_barriers + 8 * stage; }
};

// Of the warps along K, [fragment][warp][lane]; free: the ones before have been added up.
struct Sums { u32 values, free; };

// The stage that is next, and the parity of its `full` barrier; that of `empty` is the other one.
struct PipelineState {
  int stage = 0, phase = 0;
  __device__ void advance() {
    if (++stage == NUM_STAGES) stage = 0, phase ^= 1;
  }
};

// What all roles share.
struct Context {
  Arguments args;
  int num_tiles;
  Pipeline pipeline;
  const ExpertTile* tiles;
  ClaimQueue queue;
  // All of gate/up, then all of down: down waits only for work tiles that were claimed before.
  __device__ WorkTile from_index(int index) const {
    int gate_up = num_tiles * GATE_UP_TILES;
    if (index < gate_up) return {index / GATE_UP_TILES, index % GATE_UP_TILES, false};
    index -= gate_up;
    if (index >= num_tiles * DOWN_TILES) return {-1, 0, true};
    return {index / DOWN_TILES, index % DOWN_TILES, true};
  }
  __device__ WorkTile work_tile(int i) const { return from_index(queue.get(i)); }
};

// --- producers -----------------------------------------------------------------------------------

__device__ void produce_w(const Context& context, const TmaDescriptor& w13,
                          const TmaDescriptor& scales13, const TmaDescriptor& w2,
                          const TmaDescriptor& scales2) {
  const Pipeline& pipeline = context.pipeline;
  PipelineState state;
  int claimed = blockIdx.x, next = 0;  // the first one is not claimed
  for (int i = 0;; i++, claimed = next) {
    context.queue.put(i, claimed);
    WorkTile work = context.from_index(claimed);
    if (work.tile < 0) return;
    next = gridDim.x + atomicAdd(context.args.progress + 1, 1);
    ExpertTile tile = context.tiles[work.tile];
    // Read once, unless the expert has another tile.
    u64 policy = tile.rows < BLOCK_M ? EVICT_FIRST : EVICT_NORMAL;
    int chunks = work.chunks(), stages = work.stages();
    for (int k = 0; k < stages; k++, state.advance()) {
      u32 full = pipeline.full(state.stage), w = pipeline.w + state.stage * W_STAGE_BYTES;
      u32 scales = pipeline.scales + state.stage * SCALES_STAGE_BYTES;
      int chunk = k * K_WARPS, boxes = chunks - chunk > BOX_CHUNKS ? 2 : 1;
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, boxes * BOX_BYTES + SCALES_STAGE_BYTES);
      if (work.down) {
        for (int box = 0; box < boxes; box++)
          tma_load(w + box * BOX_BYTES, w2, (chunk + box * BOX_CHUNKS) * 16,
                   tile.expert * H + work.block * BLOCK_N, full, policy);
        tma_load(scales, scales2, work.block * (BLOCK_N / 4), chunk, tile.expert, full, policy);
      } else {
        for (int box = 0; box < boxes; box++)
          tma_load_4d(w + box * BOX_BYTES, w13, (chunk + box * BOX_CHUNKS) * 16, 0, 2 * tile.expert,
                      work.block * BLOCKS, full, policy);
        tma_load_4d(scales, scales13, work.block * (BLOCK_N / 8), 0, chunk, tile.expert, full,
                    policy);
      }
    }
  }
}

// A thread copies one 16-byte vector of each row.
__device__ void produce_x(const Context& context, int thread) {
  static_assert(X_PRODUCERS == K_WARPS * CHUNK / 8, "one vector of a row");
  const Pipeline& pipeline = context.pipeline;
  const Arguments& args = context.args;
  PipelineState state;
  for (int i = 0;; i++) {
    WorkTile work = context.work_tile(i);
    if (work.tile < 0) break;
    ExpertTile tile = context.tiles[work.tile];
    const u16* source[BLOCK_M];
#pragma unroll
    for (int row = 0; row < BLOCK_M; row++) {
      int pair = row < tile.rows ? args.pairs[tile.first + row] : 0;
      source[row] = (work.down ? args.act + (u64)pair * I : args.x + (u64)(pair / TOP_K) * H) +
                    thread * 8;
    }
    if (work.down)
      wait_for_act(args.progress, work.tile, GATE_UP_TILES * FRAGMENTS, thread, X_PRODUCER_BARRIER,
                   X_PRODUCERS);
    int columns = work.chunks() * CHUNK - thread * 8, stages = work.stages();
    for (int k = 0; k < stages; k++, state.advance(), columns -= K_WARPS * CHUNK) {
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      u32 x = pipeline.x + state.stage * X_STAGE_BYTES + thread * 16;
      if (columns > 0)
#pragma unroll
        for (int row = 0; row < BLOCK_M; row++)
          if (row < tile.rows) cp_async_16(x + row * X_PITCH, source[row] + k * K_WARPS * CHUNK);
      cp_async_arrive(pipeline.full(state.stage));
    }
  }
  if (thread == 0) reset_progress(args.progress, context.num_tiles);
}

// --- consumer warps ------------------------------------------------------------------------------

// acc += 16 rows of W times 8 pairs, 16 deep.
__device__ void mma(float (&acc)[4], const u32 (&w)[4], u32 x0, u32 x1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x0), "r"(x1));
}

__device__ uint2 load_shared_8(u32 smem) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(smem) : "memory");
  return v;
}

__device__ u32 load_shared_u16(u32 smem) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(smem) : "memory");
  return v;
}

// Four pairs of e2m1 codes, at the same place in both halves of a word -> bfloat16. Sign and
// magnitude go to bits 15 and 8 to 6 of a half: 2^-126 of the value, which the factor makes up for.
__device__ void convert(u32 (&w)[4], u32 word, u32 low, u32 high) {
  u32 upper = word >> 8;
  w[0] = scale_bf16x2((word & 0x000f000f) * 0x1040 & 0x81c081c0, low);
  w[1] = scale_bf16x2((word & 0x00f000f0) * 0x0104 & 0x81c081c0, high);
  w[2] = scale_bf16x2((upper & 0x000f000f) * 0x1040 & 0x81c081c0, low);
  w[3] = scale_bf16x2((upper & 0x00f000f0) * 0x0104 & 0x81c081c0, high);
}

// Eight neighbouring columns of x -> those 0 and 2, 1 and 3, 4 and 6, 5 and 7.
__device__ void pair_columns(u32 (&x)[4], uint4 columns) {
  x[0] = __byte_perm(columns.x, columns.y, 0x5410), x[1] = __byte_perm(columns.x, columns.y, 0x7632);
  x[2] = __byte_perm(columns.z, columns.w, 0x5410), x[3] = __byte_perm(columns.z, columns.w, 0x7632);
}

template <int PAIRS>
using Accumulators = float[ROW_BLOCKS][PAIRS / 8][2][4];  // of both halves of a chunk

// acc += a chunk: 8 + 8 columns a thread. w, scales: of its first row, the others 8 rows apart (in a
// stage of gate/up, rows of gate and of up alternate by eights).
template <int PAIRS>
__device__ void multiply(Accumulators<PAIRS>& acc, u32 w, u32 x, u32 scales, bool down) {
  u32 columns[PAIRS / 8][2][4];
#pragma unroll
  for (int n = 0; n < PAIRS / 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      pair_columns(columns[n][half], load_shared_16(x + n * 8 * X_PITCH + half * 64));
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; block++) {
    u32 a[2][2][4];  // of row and word
#pragma unroll
    for (int row = 0; row < 2; row++) {
      uint2 words = load_shared_8(w + (2 * block + row) * 8 * 128);
      u32 scale = load_shared_u16(scales + (down ? block * 32 + row * 16
                                                 : block * 16 + row * BLOCK_N));
      u32 low = (scale & 0xff) * 0x00800080, high = (scale >> 8) * 0x00800080;
      convert(a[row][0], words.x, low, high);
      convert(a[row][1], words.y, low, high);
    }
#pragma unroll
    for (int word = 0; word < 2; word++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 rows[4] = {a[0][word][half], a[1][word][half], a[0][word][2 + half],
                       a[1][word][2 + half]};
#pragma unroll
        for (int n = 0; n < PAIRS / 8; n++)
          mma(acc[block][n][half], rows, columns[n][half][2 * word], columns[n][half][2 * word + 1]);
      }
  }
}

// The row of eight of W that is row g of an operand: loads of a phase are in different banks.
__device__ int row_of(int g) { return g < 4 ? 2 * g : 2 * g - 7; }

// A fragment, 16 rows by 8 pairs: a thread has rows `row` and `row` + 8 (of down), or one row of gate
// and of up, of two pairs. Results are rounded as the output of a GEMM is, then weighted or activated.
__device__ void store(const float (&sum)[4], const Arguments& args, const ExpertTile& tile,
                      const WorkTile& work, int fragment) {
  int block = fragment / M_BLOCKS, p = row_of(threadIdx.x % 32 / 4);
  int first = fragment % M_BLOCKS * 8 + threadIdx.x % 4 * 2;
  int row = work.down ? work.block * BLOCK_N + block * 16 + p
                      : work.block * (BLOCK_N / 2) + block * 8 + p;
  const u16* bias = (work.down ? args.b2 + (u64)tile.expert * H
                               : args.b13 + (u64)tile.expert * 2 * I) + row;
  float biases[2] = {from_bf16(bias[0]), from_bf16(bias[work.down ? 8 : I])};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (first + i >= tile.rows) continue;
    int pair = args.pairs[tile.first + first + i];
    float a = round_bf16(sum[i] + biases[0]), b = round_bf16(sum[2 + i] + biases[1]);
    if (work.down) {
      float weight = args.weights[pair];
      float* out = args.out + ((u64)(pair % TOP_K) * args.T + pair / TOP_K) * H + row;
      out[0] = a * weight;
      out[8] = b * weight;
    } else {
      float gate = fminf(a, LIMIT), up = fminf(fmaxf(b, -LIMIT), LIMIT);
      float sigmoid = __fdividef(1.f, 1.f + __expf(-ALPHA * gate));
      args.act[(u64)pair * I + row] = to_bf16(gate * sigmoid * (up + 1.f));
    }
  }
}

// The warp's sums of its chunks of a work tile, the i-th of this CTA, to shared memory.
template <int PAIRS>
__device__ void mainloop(const Pipeline& pipeline, PipelineState& state, const WorkTile& work,
                         const Sums& sums, int i) {
  int warp = threadIdx.x / 32 - FIRST_CONSUMER, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int chunk = warp % K_WARPS, row_warp = warp / K_WARPS, chunks = work.chunks();
  int p = row_of(g), stages = work.stages();
  u32 w = pipeline.w + row_warp * ROW_BLOCKS * 2048 + chunk / BOX_CHUNKS * BOX_BYTES + p * 128 +
          ((chunk % BOX_CHUNKS * 2 + t / 2) ^ p) * 16 + t % 2 * 8;
  u32 x = pipeline.x + g * X_PITCH + chunk * CHUNK * 2 + t * 16;
  // Down: [chunk][row]; gate/up: [chunk][gate or up][row].
  u32 scales = pipeline.scales + chunk * BLOCK_N * 2 + p * 2 +
               row_warp * ROW_BLOCKS * (work.down ? 32 : 16);
  Accumulators<PAIRS> acc = {};
  for (int k = 0; k < stages; k++, state.advance()) {
    mbarrier_wait(pipeline.full(state.stage), state.phase);
    if (k * K_WARPS + chunk < chunks)
      multiply<PAIRS>(acc, w + state.stage * W_STAGE_BYTES, x + state.stage * X_STAGE_BYTES,
                      scales + state.stage * SCALES_STAGE_BYTES, work.down);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(pipeline.empty(state.stage));
  }
  mbarrier_wait(sums.free, i % 2 ^ 1);
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
    for (int n = 0; n < PAIRS / 8; n++) {
      int fragment = (row_warp * ROW_BLOCKS + block) * M_BLOCKS + n;
      const float(&v)[2][4] = acc[block][n];
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                       sums.values + ((fragment * K_WARPS + chunk) * 32 + lane) * 16),
                   "f"(v[0][0] + v[1][0]), "f"(v[0][1] + v[1][1]), "f"(v[0][2] + v[1][2]),
                   "f"(v[0][3] + v[1][3]) : "memory");
    }
}

// A warp multiplies, then the first ones add up a fragment each, in the order of the chunks.
__device__ void consume(const Context& context, const Sums& sums) {
  int warp = threadIdx.x / 32 - FIRST_CONSUMER, lane = threadIdx.x % 32;
  PipelineState state;
  for (int i = 0;; i++) {
    WorkTile work = context.work_tile(i);
    if (work.tile < 0) return;
    ExpertTile tile = context.tiles[work.tile];
    bool many = tile.rows > 8;
    if (many) mainloop<BLOCK_M>(context.pipeline, state, work, sums, i);
    else mainloop<8>(context.pipeline, state, work, sums, i);
    named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    if (warp >= FRAGMENTS) continue;
    bool used = warp % M_BLOCKS == 0 || many;
    float sum[4] = {};
    if (used)
#pragma unroll
      for (int k = 0; k < K_WARPS; k++) {
        uint4 v = load_shared_16(sums.values + ((warp * K_WARPS + k) * 32 + lane) * 16);
        sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
        sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
      }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(sums.free);
    if (used) store(sum, context.args, tile, work, warp);
    if (!work.down) {
      __syncwarp();
      if (lane == 0) add_release(context.args.progress + 2 + work.tile, 1);
    }
  }
}

// --- kernel --------------------------------------------------------------------------------------

// Shared memory: pipeline stages, sums, mbarriers (full, empty, sums are free, claims), claimed work
// tiles, expert tiles. All CTAs must fit on the GPU at once, since they wait for each other's act.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts_mxfp4_sm90_kernel(const __grid_constant__ TmaDescriptor w13,
                          const __grid_constant__ TmaDescriptor scales13,
                          const __grid_constant__ TmaDescriptor w2,
                          const __grid_constant__ TmaDescriptor scales2, const u16* x, u16* act,
                          float* out, const u16* b13, const u16* b2, const float* weights,
                          const int* pairs, const int* tiles, int* progress, int max_tiles, int T) {
  griddepcontrol_launch_dependents();  // takes effect when all CTAs have started
  extern __shared__ unsigned char smem[];
  u32 base = (smem_address(smem) + 1023) & ~1023u;
  u32 xs = base + NUM_STAGES * W_STAGE_BYTES, scales = xs + NUM_STAGES * X_STAGE_BYTES;
  u32 sums = scales + NUM_STAGES * SCALES_STAGE_BYTES, barriers = sums + SUMS_BYTES;
  Pipeline pipeline{base, xs, scales, barriers, barriers + 8 * NUM_STAGES};
  u32 free = barriers + 16 * NUM_STAGES, claims = free + 8;
  int* claimed = (int*)(smem + (claims + 8 * QUEUE - smem_address(smem)));
  ExpertTile* list = (ExpertTile*)(claimed + QUEUE);
  if (threadIdx.x == 0) {
    for (int i = 0; i < NUM_STAGES; i++) {
      mbarrier_init(pipeline.full(i), 1 + X_PRODUCERS);
      mbarrier_init(pipeline.empty(i), CONSUMER_WARPS);
    }
    mbarrier_init(free, FRAGMENTS);
    for (int i = 0; i < QUEUE; i++) mbarrier_init(claims + 8 * i, 1);
    mbarrier_init_fence();
  }
  griddepcontrol_wait();
  int used = load_tiles<THREADS>(list, tiles, max_tiles);
  Context context{{x, act, out, b13, b2, weights, pairs, progress, T}, used, pipeline, list,
                  {claims, claimed}};
  int warp = threadIdx.x / 32;
  if (warp == 0) {
    if (threadIdx.x == 0) produce_w(context, w13, scales13, w2, scales2);
  } else if (warp == 1 || warp == 2) {
    produce_x(context, threadIdx.x - 32);
  } else {
    consume(context, {sums, free});
  }
}
