// The router of a mixture of experts for up to 128 tokens on Hopper (sm_90a): logits, scores, top-k,
// weights, and the experts' lists of pairs and tiles, in one cluster of 8 CTAs. router_sm90.py
// explains the design, compiles and launches it.
//
// router_sm90.py puts its configuration in front of this file, as macros:
//   HIDDEN, NUM_EXPERTS         H and E of the weight [E, H]
//   SLICE                       columns of a CTA, a multiple of 32
//   TILES_PER_WARP              tiles of 8 experts that a warp multiplies
//   TOP_K, NUM_SHARED           choices of a token; shared experts, which are appended to them
//   NUM_GROUPS, KEPT_GROUPS     groups of experts (1: none), and how many of them are kept
//   TOP2                        a group's score is the sum of its two best ones, not its best
//   SIGMOID                     scores are sigmoids, not a softmax
//   NORM                        the weights are divided by their sum
//   ROUND_LOGITS                logits are rounded to bfloat16 first
//   HAS_BIAS                    a bias is added to the scores to choose experts

#ifndef HIDDEN  // opened in an IDE: one consistent configuration
#define HIDDEN 2048
#define NUM_EXPERTS 128
#define SLICE 256
#define TILES_PER_WARP 2
#define TOP_K 8
#define NUM_SHARED 0
#define NUM_GROUPS 1
#define KEPT_GROUPS 1
#define TOP2 0
#define SIGMOID 0
#define NORM 1
#define ROUND_LOGITS 1
#define HAS_BIAS 0
#endif

#include "sm90.cuh"

constexpr int CTAS = 8, WARPS = 8, THREADS = 32 * WARPS;
constexpr int BLOCK_M = 16;     // most pairs of a tile of an expert's list
constexpr int FEW_TOKENS = 2;   // so many are all CTA 0's when experts are chosen
constexpr int TOKENS_MMA = 16, EXPERTS_MMA = 8;           // of mma.sync: M and N
constexpr int CHUNK = 32, CHUNKS = SLICE / CHUNK;         // columns of two mma.sync
constexpr int CHUNKS_IN_FLIGHT = TILES_PER_WARP * CHUNKS > 16 ? 4 : 8;  // loads of x at a time
constexpr int SLICES = (HIDDEN + SLICE - 1) / SLICE;      // one to a CTA
constexpr int EXPERT_TILES = (NUM_EXPERTS + EXPERTS_MMA - 1) / EXPERTS_MMA;
constexpr int ROW = EXPERT_TILES * EXPERTS_MMA;           // floats of a token's partials of a slice
constexpr int LANE_EXPERTS = (NUM_EXPERTS + 31) / 32;     // a lane's: lane, lane + 32, ...
constexpr int CHOICES = TOP_K + NUM_SHARED;
constexpr float NORM_EPS = 1e-20f, NAN_CHOICE = -1e30f;   // scores of NaN are chosen last
constexpr u32 ALL_LANES = 0xffffffff, USED = 0;           // USED: below the key of any float
static_assert(CTAS == 8 && SLICES <= CTAS && SLICE % CHUNK == 0, "a slice per CTA");
static_assert(EXPERT_TILES <= WARPS * TILES_PER_WARP, "all experts are a warp's");
static_assert(NUM_GROUPS <= 32 && CHOICES <= 32, "one lane each");

struct Arguments {
  const u16* x;                  // [T, H] bf16
  const u16* weight;             // [E, H] bf16
  const float* correction_bias;  // [E], with HAS_BIAS
  float* weights;                // [T, k + shared]
  int* experts;                  // [T, k + shared]
  int* pairs;                    // [E + shared, T]
  int* tiles;                    // [3, max_tiles]
  int T, max_tiles;
  float factor;
};

// --- logits --------------------------------------------------------------------------------------

// acc += 16 tokens by 8 experts, 16 columns deep. A thread holds columns (2 i, 2 i + 1) and
// (2 i + 8, 2 i + 9), i = lane % 4, of token lane / 4 (a0, a2) and lane / 4 + 8 (a1, a3) and of
// expert lane / 4 (b0, b1); in acc, experts 2 i and 2 i + 1 of both tokens.
__device__ void mma(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes that no kernel writes. volatile: they are requested before griddepcontrol_wait().
__device__ uint4 load_constant(const u16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ float load_constant(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

// The first column of a thread's 8 in chunk 0 of a slice. Of these 8, mma.sync takes 4 at a time as
// those that belong to its thread; which ones does not matter, as x and the weight agree.
__device__ int first_column(int slice, int lane) { return slice * SLICE + lane % 4 * 8; }
__device__ bool is_column(int column) { return HIDDEN == CTAS * SLICE || column < HIDDEN; }
__device__ bool is_expert(int expert) { return NUM_EXPERTS % 64 == 0 || expert < NUM_EXPERTS; }

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
__device__ uint4 load_x(const u16* p, bool valid) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.s32 p, %5, 0;\n"
      "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((int)valid));
  return v;
}

// acc = partials of a slice for 16 tokens and the warp's experts. Even and odd steps are added up
// apart, so that one mma.sync need not wait for the other.
__device__ void multiply(float (&acc)[TILES_PER_WARP][4], const WeightFragments& weight,
                         const Arguments& args, int first_token, int slice, int lane) {
  float odd[TILES_PER_WARP][4];
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * 4; i++) acc[i / 4][i % 4] = odd[i / 4][i % 4] = 0.f;
  int token = first_token + lane / 4, column = first_column(slice, lane);
  const u16* row = args.x + token * HIDDEN + column;
#pragma unroll
  for (int first = 0; first < CHUNKS; first += CHUNKS_IN_FLIGHT) {
    uint4 x[CHUNKS_IN_FLIGHT], x8[CHUNKS_IN_FLIGHT];  // of the token, and the 8th after it
#pragma unroll
    for (int i = 0; i < CHUNKS_IN_FLIGHT; i++) {
      if (first + i >= CHUNKS) break;
      int offset = (first + i) * CHUNK;
      x[i] = load_x(row + offset, token < args.T && is_column(column + offset));
      x8[i] = load_x(row + 8 * HIDDEN + offset, token + 8 < args.T && is_column(column + offset));
    }
#pragma unroll
    for (int i = 0; i < CHUNKS_IN_FLIGHT; i++) {
      if (first + i >= CHUNKS) break;
#pragma unroll
      for (int tile = 0; tile < TILES_PER_WARP; tile++) {
        uint4 w = weight.vectors[tile][first + i];
        mma(acc[tile], x[i].x, x8[i].x, x[i].y, x8[i].y, w.x, w.y);
        mma(odd[tile], x[i].z, x8[i].z, x[i].w, x8[i].w, w.z, w.w);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * 4; i++) acc[i / 4][i % 4] += odd[i / 4][i % 4];
}

// --- distributed shared memory -------------------------------------------------------------------

// Shared-memory addresses, the same in all CTAs. `choices` and its mbarrier are CTA 0's.
struct Exchange {
  u32 partials, choices;  // [SLICES, slots, ROW] float32; [T, TOP_K] int32
  u32 partials_barrier, choices_barrier;
};

// Which CTA chooses the experts of a token, and where its partials are there.
struct TokenMap {
  int T, shift, slots;  // 1 << shift: CTAs; slots: most tokens of one
  __device__ TokenMap(int T)
      : T(T), shift(T <= FEW_TOKENS ? 0 : 3), slots((T + (1 << shift) - 1) >> shift) {}
  __device__ int owner(int token) const { return token & (1 << shift) - 1; }
  __device__ int slot(int token) const { return token >> shift; }
  __device__ int token(int cta_rank, int slot) const { return (slot << shift) + cta_rank; }
  __device__ int row(int slice, int slot) const { return (slice * slots + slot) * ROW; }
  __device__ int count(int cta_rank) const {  // tokens of a CTA
    return cta_rank < 1 << shift ? (T - cta_rank + (1 << shift) - 1) >> shift : 0;
  }
};

// Each mbarrier has one phase: of the bytes that arrive in this CTA. One thread.
__device__ void init_barriers(const Exchange& exchange, const TokenMap& map, int cta_rank) {
  mbarrier_init(exchange.partials_barrier, 1);
  mbarrier_init(exchange.choices_barrier, 1);
  mbarrier_init_fence();
  mbarrier_arrive_expect_tx(exchange.partials_barrier, SLICES * map.count(cta_rank) * ROW * 4);
  mbarrier_arrive_expect_tx(exchange.choices_barrier, cta_rank == 0 ? map.T * TOP_K * 4 : 0);
}

// Stores the partials of 16 tokens in the CTAs that choose their experts.
__device__ void send_partials(const float (&acc)[TILES_PER_WARP][4], const Exchange& exchange,
                              const TokenMap& map, int first_token, int slice, int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int token = first_token + lane / 4 + 8 * half, owner = map.owner(token);
    if (token >= map.T) continue;
    u32 row = remote_smem(exchange.partials + map.row(slice, map.slot(token)) * 4, owner);
    u32 barrier = remote_smem(exchange.partials_barrier, owner);
#pragma unroll
    for (int tile = 0; tile < TILES_PER_WARP; tile++) {
      int expert_tile = tile * WARPS + warp;
      if (expert_tile < EXPERT_TILES)
        store_remote(row + (expert_tile * EXPERTS_MMA + lane % 4 * 2) * 4, acc[tile][2 * half],
                     acc[tile][2 * half + 1], barrier);
    }
  }
}

// --- choice of experts: one warp per token -------------------------------------------------------

// Keys are ordered as floats are.
__device__ u32 to_key(float x) {
  u32 bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffff : 0x80000000);
}
__device__ float from_key(u32 key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000 : 0xffffffff));
}

__device__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x += __shfl_xor_sync(ALL_LANES, x, distance);
  return x;
}

// Loaded before it is needed, as the weight is.
__device__ void load_bias(float (&bias)[LANE_EXPERTS], const float* correction_bias, int lane) {
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    bias[j] = HAS_BIAS && is_expert(lane + 32 * j) ? load_constant(correction_bias + lane + 32 * j)
                                                   : 0.f;
}

// Sums of the slices, in order; -inf beyond the experts.
__device__ void sum_slices(float (&logits)[LANE_EXPERTS], const float* partials,
                           const TokenMap& map, int slot, int lane) {
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) {
    int expert = lane + 32 * j;
    logits[j] = __uint_as_float(0xff800000);
    if (!is_expert(expert)) continue;
    float sum = partials[map.row(0, slot) + expert];
#pragma unroll
    for (int slice = 1; slice < SLICES; slice++) sum += partials[map.row(slice, slot) + expert];
    logits[j] = ROUND_LOGITS ? low(pack_bf16x2(sum, 0.f)) : sum;
  }
}

// Sigmoids, or the softmax over all experts.
__device__ void to_scores(float (&values)[LANE_EXPERTS]) {
  if (SIGMOID) {
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) values[j] = 1.f / (1.f + expf(-values[j]));
    return;
  }
  u32 key = to_key(values[0]);
#pragma unroll
  for (int j = 1; j < LANE_EXPERTS; j++) key = max(key, to_key(values[j]));
  float largest = from_key(__reduce_max_sync(ALL_LANES, key)), sum = 0.f;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) sum += values[j] = expf(values[j] - largest);
  sum = warp_sum(sum);
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) values[j] /= sum;
}

// What experts are chosen by, as keys.
__device__ void to_keys(u32 (&keys)[LANE_EXPERTS], const float (&scores)[LANE_EXPERTS],
                        const float (&bias)[LANE_EXPERTS], int lane) {
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) {
    float choice = HAS_BIAS ? scores[j] + bias[j] : scores[j];
    // A token with NaN still gets k different experts; its weights are NaN.
    u32 key = to_key(choice == choice ? choice : NAN_CHOICE);
    keys[j] = is_expert(lane + 32 * j) ? key : USED;
  }
}

// The expert of the largest key, the lowest of equals. `best`: its key. The same in all lanes.
__device__ int find_best(const u32 (&keys)[LANE_EXPERTS], int lane, u32& best) {
  u32 key = keys[0], expert = ALL_LANES;
#pragma unroll
  for (int j = 1; j < LANE_EXPERTS; j++) key = max(key, keys[j]);
  best = __reduce_max_sync(ALL_LANES, key);
#pragma unroll
  for (int j = LANE_EXPERTS - 1; j >= 0; j--) expert = keys[j] == best ? lane + 32 * j : expert;
  return __reduce_min_sync(ALL_LANES, expert);
}

__device__ void mark_used(u32 (&keys)[LANE_EXPERTS], int expert, int lane) {
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    keys[j] = expert == lane + 32 * j ? USED : keys[j];
}

__device__ int group_of(int expert) { return expert / (NUM_EXPERTS / NUM_GROUPS); }

// The score of a group: its best choice, or the sum of the two best. The same in all lanes.
__device__ float group_score(const u32 (&keys)[LANE_EXPERTS], int group, int lane) {
  u32 members[LANE_EXPERTS], best, second;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    members[j] = group_of(lane + 32 * j) == group ? keys[j] : USED;
  int expert = find_best(members, lane, best);
  if (!TOP2) return from_key(best);
  mark_used(members, expert, lane);
  find_best(members, lane, second);
  return from_key(best) + from_key(second);
}

// Marks the experts of all but the best groups as used. Lane g holds the key of group g.
__device__ void keep_best_groups(u32 (&keys)[LANE_EXPERTS], int lane) {
  u32 group_key = USED, kept = 0;
#pragma unroll
  for (int group = 0; group < NUM_GROUPS; group++) {
    u32 key = to_key(group_score(keys, group, lane));
    group_key = lane == group ? key : group_key;
  }
#pragma unroll
  for (int i = 0; i < KEPT_GROUPS; i++) {
    u32 best = __reduce_max_sync(ALL_LANES, group_key);
    int group = __ffs(__ballot_sync(ALL_LANES, group_key == best)) - 1;  // the lowest of equals
    kept |= 1u << group;
    group_key = lane == group ? USED : group_key;
  }
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    keys[j] = kept >> group_of(lane + 32 * j) % 32 & 1 ? keys[j] : USED;
}

// The score of an expert, from the lane that holds it.
__device__ float score_of(const float (&scores)[LANE_EXPERTS], int expert, int lane) {
  float score = 0.f;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) score = expert == lane + 32 * j ? scores[j] : score;
  return __shfl_sync(ALL_LANES, score, expert % 32);
}

// Experts and weights of a token. Lane c has choice c and sends it to CTA 0.
__device__ void choose_experts(const Arguments& args, const Exchange& exchange,
                               const float (&scores)[LANE_EXPERTS],
                               const float (&bias)[LANE_EXPERTS], int token, int lane) {
  u32 keys[LANE_EXPERTS], key;
  to_keys(keys, scores, bias, lane);
  if (NUM_GROUPS > 1) keep_best_groups(keys, lane);
  float weight = 1.f, total = 0.f;
  int expert = NUM_EXPERTS + lane - TOP_K;  // shared, of the lanes after the choices
#pragma unroll
  for (int i = 0; i < TOP_K; i++) {
    int best = find_best(keys, lane, key);
    mark_used(keys, best, lane);
    float score = score_of(scores, best, lane);
    total += score;
    expert = lane == i ? best : expert;
    weight = lane == i ? score : weight;
  }
  if (lane < TOP_K) {
    store_remote(remote_smem(exchange.choices + (token * TOP_K + lane) * 4, 0), expert,
                 remote_smem(exchange.choices_barrier, 0));
    if (NORM) weight /= total + NORM_EPS;
    weight *= args.factor;
  }
  if (lane < CHOICES) {
    args.weights[token * CHOICES + lane] = weight;
    args.experts[token * CHOICES + lane] = expert;
  }
}

// --- lists and tiles: CTA 0 ----------------------------------------------------------------------

__device__ void write_tile(const Arguments& args, int tile, int expert, int first, int rows) {
  args.tiles[tile] = expert;
  args.tiles[args.max_tiles + tile] = expert * args.T + first;
  args.tiles[2 * args.max_tiles + tile] = rows;
}

// Fills the table of which choice an expert is of a token, plus 1: ranks [T, E] bytes, zero before.
__device__ void tabulate(unsigned char* ranks, const int* choices, int T) {
  for (int i = threadIdx.x; i < T * TOP_K; i += THREADS)
    ranks[i / TOP_K * NUM_EXPERTS + choices[i]] = i % TOP_K + 1;
  __syncthreads();
}

// Writes an expert's pairs, in order of tokens. Returns how many.
__device__ int list_pairs(const Arguments& args, const unsigned char* ranks, int expert) {
  int count = 0;
#pragma unroll 8
  for (int token = 0; token < args.T; token++) {
    int rank = ranks[token * NUM_EXPERTS + expert];
    if (rank > 0) args.pairs[expert * args.T + count++] = token * CHOICES + rank - 1;
  }
  return count;
}

// The sum of n < 16 over the lower lanes; `total`: over all.
__device__ int sum_of_lower_lanes(int n, int lane, int& total) {
  int lower = 0;
  total = 0;
#pragma unroll
  for (int bit = 0; bit < 4; bit++) {
    u32 set = __ballot_sync(ALL_LANES, n >> bit & 1);
    lower += __popc(set & ((1u << lane) - 1)) << bit;
    total += __popc(set) << bit;
  }
  return lower;
}

// The lists of routed experts, one thread per expert, and their tiles. Returns how many tiles.
__device__ int list_routed(const Arguments& args, const unsigned char* ranks, int warp, int lane) {
  constexpr int ROUNDS = (NUM_EXPERTS + THREADS - 1) / THREADS;
  __shared__ int warp_tiles[ROUNDS][WARPS];
  int used = 0;
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    int expert = round * THREADS + warp * 32 + lane, total;
    int count = expert < NUM_EXPERTS ? list_pairs(args, ranks, expert) : 0;
    int num_tiles = (count + BLOCK_M - 1) / BLOCK_M;
    int tile = used + sum_of_lower_lanes(num_tiles, lane, total);
    if (lane == 0) warp_tiles[round][warp] = total;
    __syncthreads();
#pragma unroll
    for (int other = 0; other < WARPS; other++) {
      if (other < warp) tile += warp_tiles[round][other];
      used += warp_tiles[round][other];
    }
    for (int i = 0; i < num_tiles; i++)
      write_tile(args, tile + i, expert, i * BLOCK_M, min(count - i * BLOCK_M, BLOCK_M));
  }
  return used;
}

// The lists of shared experts hold all tokens. Returns how many tiles.
__device__ int list_shared(const Arguments& args, int used) {
  int per_expert = (args.T + BLOCK_M - 1) / BLOCK_M;
  for (int i = threadIdx.x; i < NUM_SHARED * args.T; i += THREADS) {
    int shared = i / args.T, token = i % args.T;
    args.pairs[NUM_EXPERTS * args.T + i] = token * CHOICES + TOP_K + shared;
  }
  for (int i = threadIdx.x; i < NUM_SHARED * per_expert; i += THREADS) {
    int first = i % per_expert * BLOCK_M;
    write_tile(args, used + i, NUM_EXPERTS + i / per_expert, first, min(args.T - first, BLOCK_M));
  }
  return NUM_SHARED * per_expert;
}

// --- kernel --------------------------------------------------------------------------------------

// Shared memory: partials [SLICES, slots, ROW] float32; in CTA 0, choices [T, TOP_K] int32 and ranks
// [T, E] bytes. A CTA may exit when it has sent its last value: others write into a CTA's shared
// memory only what it waits for.
extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
router_sm90_kernel(const u16* x, const u16* weight, const float* correction_bias, float* weights,
                   int* experts, int* pairs, int* tiles, int T, int max_tiles, float factor) {
  griddepcontrol_launch_dependents();
  __shared__ u64 barriers[2];
  extern __shared__ __align__(16) unsigned char smem[];
  Arguments args{x, weight, correction_bias, weights, experts, pairs, tiles, T, max_tiles, factor};
  int cta_rank = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  TokenMap map(T);
  const float* partials = (const float*)smem;
  const int* choices = (const int*)(partials + SLICES * map.slots * ROW);
  unsigned char* ranks = (unsigned char*)(choices + T * TOP_K);
  Exchange exchange{smem_address(partials), smem_address(choices), smem_address(barriers),
                    smem_address(barriers + 1)};
  if (threadIdx.x == 0) init_barriers(exchange, map, cta_rank);
  cluster_arrive();
  WeightFragments fragments(weight, cta_rank, warp, lane);
  float bias[LANE_EXPERTS];
  load_bias(bias, correction_bias, lane);
  if (cta_rank == 0)
    for (int i = threadIdx.x; i < (T * NUM_EXPERTS + 3) / 4; i += THREADS) ((u32*)ranks)[i] = 0;
  cluster_wait();  // all CTAs have started and initialised their mbarriers
  griddepcontrol_wait();

  if (cta_rank < SLICES)
    for (int first = 0; first < T; first += TOKENS_MMA) {
      float acc[TILES_PER_WARP][4];
      multiply(acc, fragments, args, first, cta_rank, lane);
      send_partials(acc, exchange, map, first, cta_rank, warp, lane);
    }
  mbarrier_wait(exchange.partials_barrier, 0);
  for (int slot = warp; slot < map.count(cta_rank); slot += WARPS) {
    float scores[LANE_EXPERTS];
    sum_slices(scores, partials, map, slot, lane);
    to_scores(scores);
    choose_experts(args, exchange, scores, bias, map.token(cta_rank, slot), lane);
  }
  if (cta_rank > 0) return;
  mbarrier_wait(exchange.choices_barrier, 0);
  __syncthreads();  // `ranks` is zero
  tabulate(ranks, choices, T);
  int used = list_routed(args, ranks, warp, lane);
  if (NUM_SHARED > 0) used += list_shared(args, used);
  for (int i = used + threadIdx.x; i < max_tiles; i += THREADS) tiles[2 * max_tiles + i] = 0;
}
