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
constexpr int MAX_TOKENS = 128, TOKEN_WORDS = MAX_TOKENS / 32;
constexpr int TOKENS_MMA = 16, EXPERTS_MMA = 8;           // of mma.sync: M and N
constexpr int CHUNK = 32, CHUNKS = SLICE / CHUNK;         // columns of two mma.sync
constexpr int CHUNKS_IN_FLIGHT = TILES_PER_WARP * CHUNKS > 16 ? 4 : 8;  // loads of x at a time
constexpr int SLICES = (HIDDEN + SLICE - 1) / SLICE;      // one to a CTA
constexpr int EXPERT_TILES = (NUM_EXPERTS + EXPERTS_MMA - 1) / EXPERTS_MMA;
constexpr int ROW = EXPERT_TILES * EXPERTS_MMA;           // floats of a token's partials of a slice
// x in shared memory: with 64 bytes of padding, two tokens' fragments of a chunk are in all banks.
constexpr int X_ROW = SLICE + 32;                         // elements from token to token
constexpr int X_VECTORS = SLICE / 8;                      // of 8 elements
constexpr int LANE_EXPERTS = (NUM_EXPERTS + 31) / 32;     // a lane's: lane, lane + 32, ...
constexpr int CHOICES = TOP_K + NUM_SHARED;
constexpr float NORM_EPS = 1e-20f, NAN_CHOICE = -1e30f;   // scores of NaN are chosen last
constexpr u32 ALL_LANES = 0xffffffff, USED = 0;           // USED: below the key of any float
static_assert(CTAS == 8 && SLICES <= CTAS && SLICE % CHUNK == 0, "a slice per CTA");
static_assert(EXPERT_TILES <= WARPS * TILES_PER_WARP, "all experts are a warp's");
static_assert(TOKENS_MMA * X_VECTORS % THREADS == 0, "a thread copies as much as another");
static_assert(NUM_GROUPS <= 32 && CHOICES <= 32, "one lane each");

__device__ int num_token_tiles(int T) { return (T + TOKENS_MMA - 1) / TOKENS_MMA; }
__device__ int next_tile(int tile, int tiles) { return tile + 1 < tiles ? tile + 1 : 0; }

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

// A thread's columns of tokens lane / 4 and, in half 1, lane / 4 + 8. Few tokens are one tile, in
// global memory.
struct GlobalX {
  const u16* row;
  int column, token, T;
  __device__ GlobalX(const Arguments& args, int slice, int lane)
      : column(first_column(slice, lane)), token(lane / 4), T(args.T) {
    row = args.x + token * HIDDEN + column;
  }
  __device__ uint4 load(int half, int offset) const {
    return load_x(row + 8 * half * HIDDEN + offset,
                  token + 8 * half < T && is_column(column + offset));
  }
};

// The same of a tile in shared memory.
struct SharedX {
  const u16* row;
  __device__ SharedX(const u16* x, int tile, int lane)
      : row(x + (tile * TOKENS_MMA + lane / 4) * X_ROW + lane % 4 * 8) {}
  __device__ uint4 load(int half, int offset) const {
    return *(const uint4*)(row + 8 * half * X_ROW + offset);
  }
};

// x in a register of its own. mma.sync needs its operands in adjacent ones; without this, ptxas moves
// them there for each mma.sync anew.
__device__ u32 copy(u32 x) {
  u32 y;
  asm volatile("prmt.b32 %0, %1, 0, 0x3210;" : "=r"(y) : "r"(x));
  return y;
}

// acc = partials of a slice for 16 tokens and the warp's experts. Even and odd steps are added up
// apart, so that one mma.sync need not wait for the other.
template <class X>
__device__ void multiply(float (&acc)[TILES_PER_WARP][4], const WeightFragments& weight,
                         const X& tile_x) {
  float odd[TILES_PER_WARP][4];
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * 4; i++) acc[i / 4][i % 4] = odd[i / 4][i % 4] = 0.f;
#pragma unroll
  for (int first = 0; first < CHUNKS; first += CHUNKS_IN_FLIGHT) {
    uint4 x[CHUNKS_IN_FLIGHT], x8[CHUNKS_IN_FLIGHT];  // of the token, and the 8th after it
#pragma unroll
    for (int i = 0; i < CHUNKS_IN_FLIGHT; i++) {
      if (first + i >= CHUNKS) break;
      x[i] = tile_x.load(0, (first + i) * CHUNK);
      x8[i] = tile_x.load(1, (first + i) * CHUNK);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS_IN_FLIGHT; i++) {
      if (first + i >= CHUNKS) break;
      u32 a[4] = {copy(x[i].x), copy(x8[i].x), copy(x[i].y), copy(x8[i].y)};
      u32 b[4] = {copy(x[i].z), copy(x8[i].z), copy(x[i].w), copy(x8[i].w)};
#pragma unroll
      for (int tile = 0; tile < TILES_PER_WARP; tile++) {
        uint4 w = weight.vectors[tile][first + i];
        mma(acc[tile], a[0], a[1], a[2], a[3], w.x, w.y);
        mma(odd[tile], b[0], b[1], b[2], b[3], w.z, w.w);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * 4; i++) acc[i / 4][i % 4] += odd[i / 4][i % 4];
}

// --- distributed shared memory -------------------------------------------------------------------

// Shared-memory addresses, the same in all CTAs. `choices` and its mbarrier are CTA 0's.
struct Exchange {
  u32 partials, choices;  // TokenMap::partial; [T, TOP_K] int32
  u32 partials_barrier, choices_barrier;
};

// Which CTA chooses the experts of a token, and where its partials are there. CTAs take runs of
// tokens in turn. Up to 16 tokens, a run is one token, so that every CTA has some. Beyond, it is 4, so
// that a warp's store of 8 tokens by 8 experts goes to 2 CTAs, 128 contiguous bytes each, not to 8.
struct TokenMap {
  int T, shift, run, slots;  // 1 << shift: CTAs; 1 << run: tokens; slots: most tokens of one CTA
  __device__ TokenMap(int T)
      : T(T), shift(T <= FEW_TOKENS ? 0 : 3), run(T <= TOKENS_MMA ? 0 : 2) {
    slots = (((T - 1) >> (shift + run)) + 1) << run;
  }
  __device__ int in_run(int i) const { return i & ((1 << run) - 1); }
  __device__ int owner(int token) const { return (token >> run) & ((1 << shift) - 1); }
  __device__ int slot(int token) const {
    return ((token >> (shift + run)) << run) + in_run(token);
  }
  __device__ int token(int cta_rank, int slot) const {
    return ((((slot >> run) << shift) + cta_rank) << run) + in_run(slot);
  }
  // The first of 8 floats of an expert tile: [SLICES, slots >> run, EXPERT_TILES, 1 << run, 8]. The
  // slots of a run are permuted: 4 expert tiles, which a warp reads at a time, are in all banks.
  __device__ int partial(int slice, int slot, int expert_tile) const {
    int tile = (slice * slots + (slot - in_run(slot))) * EXPERT_TILES + (expert_tile << run);
    return (tile + in_run(slot ^ expert_tile)) * EXPERTS_MMA;
  }
  __device__ int count(int cta_rank) const {  // tokens of a CTA
    if (cta_rank >= 1 << shift) return 0;
    int per_turn = 1 << (shift + run), rest = (T & (per_turn - 1)) - (cta_rank << run);
    return ((T >> (shift + run)) << run) + max(0, min(rest, 1 << run));
  }
};

// The mbarriers have one phase each: of the bytes that other CTAs send, and of the tiles of x, if
// there are many tokens. One thread.
__device__ void init_barriers(const Exchange& exchange, const TokenMap& map, u32 x_barriers,
                              int cta_rank) {
  mbarrier_init(exchange.partials_barrier, 1);
  mbarrier_init(exchange.choices_barrier, 1);
  if (map.T > TOKENS_MMA)
#pragma unroll
    for (int tile = 0; tile < MAX_TOKENS / TOKENS_MMA; tile++)
      mbarrier_init(x_barriers + 8 * tile, THREADS);
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
    u32 partials = remote_smem(exchange.partials, owner);
    u32 barrier = remote_smem(exchange.partials_barrier, owner);
#pragma unroll
    for (int tile = 0; tile < TILES_PER_WARP; tile++) {
      int expert_tile = tile * WARPS + warp;
      if (expert_tile < EXPERT_TILES)
        store_remote(
            partials + (map.partial(slice, map.slot(token), expert_tile) + lane % 4 * 2) * 4,
            acc[tile][2 * half], acc[tile][2 * half + 1], barrier);
    }
  }
}

// --- many tokens: x in shared memory -------------------------------------------------------------

// Requests x of all tokens for the CTA, [T, X_ROW]. Tile by tile, from tile `first_tile` on and
// around, it arrives at an mbarrier for each.
__device__ void copy_x(const Arguments& args, u32 x, u32 barriers, int first_tile, int slice) {
  int tiles = num_token_tiles(args.T);
  for (int i = 0, tile = first_tile; i < tiles; i++, tile = next_tile(tile, tiles)) {
#pragma unroll
    for (int j = 0; j < TOKENS_MMA * X_VECTORS / THREADS; j++) {
      int vector = threadIdx.x + j * THREADS, offset = vector % X_VECTORS * 8;
      int token = tile * TOKENS_MMA + vector / X_VECTORS, column = slice * SLICE + offset;
      cp_async_16(x + (token * X_ROW + offset) * 2, args.x + token * HIDDEN + column,
                  token < args.T && is_column(column));
    }
    cp_async_arrive(barriers + 8 * tile);
  }
}

// CTAs start with different tiles, so that they do not all send to the same ones at a time.
__device__ void multiply_many(const WeightFragments& weight, const Arguments& args,
                              const Exchange& exchange, const TokenMap& map, const u16* x,
                              u32 x_barriers, int slice, int warp, int lane) {
  int tiles = num_token_tiles(args.T), first_tile = slice % tiles;
  copy_x(args, smem_address(x), x_barriers, first_tile, slice);
  for (int i = 0, tile = first_tile; i < tiles; i++, tile = next_tile(tile, tiles)) {
    mbarrier_wait(x_barriers + 8 * tile, 0);
    float acc[TILES_PER_WARP][4];
    multiply(acc, weight, SharedX(x, tile, lane));
    send_partials(acc, exchange, map, tile * TOKENS_MMA, slice, warp, lane);
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
    const float* p = partials + map.partial(0, slot, expert / EXPERTS_MMA) + expert % EXPERTS_MMA;
    float sum = p[0];
#pragma unroll
    for (int slice = 1; slice < SLICES; slice++) sum += p[slice * map.slots * ROW];
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

// Sets the bits of the tokens that chose an expert: chosen [E, TOKEN_WORDS], zero before.
__device__ void mark_tokens(u32* chosen, const int* choices, int T) {
  for (int i = threadIdx.x; i < T * TOP_K; i += THREADS) {
    int token = i / TOP_K;
    atomicOr(chosen + choices[i] * TOKEN_WORDS + token / 32, 1u << token % 32);
  }
  __syncthreads();
}

// How many of the first `tokens` chose an expert.
__device__ int count_tokens(const u32* chosen, int expert, int tokens) {
  uint4 v = *(const uint4*)(chosen + expert * TOKEN_WORDS);
  u32 words[TOKEN_WORDS] = {v.x, v.y, v.z, v.w};
  int count = 0;
#pragma unroll
  for (int i = 0; i < TOKEN_WORDS; i++) {
    int bits = tokens - 32 * i;
    u32 mask = bits >= 32 ? 0xffffffff : bits > 0 ? (1u << bits) - 1 : 0;
    count += __popc(words[i] & mask);
  }
  return count;
}

// The lists of routed experts, in order of tokens: a pair comes after those of earlier tokens.
__device__ void list_pairs(const Arguments& args, const u32* chosen, const int* choices) {
  for (int i = threadIdx.x; i < args.T * TOP_K; i += THREADS) {
    int token = i / TOP_K, expert = choices[i];
    args.pairs[expert * args.T + count_tokens(chosen, expert, token)] =
        token * CHOICES + i % TOP_K;
  }
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

// The tiles of routed experts, one thread per expert. Returns how many.
__device__ int list_tiles(const Arguments& args, const u32* chosen, int warp, int lane) {
  constexpr int ROUNDS = (NUM_EXPERTS + THREADS - 1) / THREADS;
  __shared__ int warp_tiles[ROUNDS][WARPS];
  int used = 0;
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    int expert = round * THREADS + warp * 32 + lane, total;
    int count = expert < NUM_EXPERTS ? count_tokens(chosen, expert, MAX_TOKENS) : 0;
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

// Shared memory: partials (see TokenMap) float32; in CTA 0, the experts' tokens [E, TOKEN_WORDS] bits;
// with many tokens, x [T, X_ROW] bf16, T up to a multiple of 16; in CTA 0, choices [T, TOP_K] int32.
// A CTA may exit when it has sent its last value: others write into a CTA's shared memory only what
// it waits for.
extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
router_sm90_kernel(const u16* x, const u16* weight, const float* correction_bias, float* weights,
                   int* experts, int* pairs, int* tiles, int T, int max_tiles, float factor) {
  griddepcontrol_launch_dependents();
  __shared__ u64 barriers[2 + MAX_TOKENS / TOKENS_MMA];
  extern __shared__ __align__(16) unsigned char smem[];
  Arguments args{x, weight, correction_bias, weights, experts, pairs, tiles, T, max_tiles, factor};
  int cta_rank = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bool many = T > TOKENS_MMA;
  TokenMap map(T);
  const float* partials = (const float*)smem;
  u32* chosen = (u32*)(partials + SLICES * map.slots * ROW);
  const u16* x_smem = (const u16*)(chosen + NUM_EXPERTS * TOKEN_WORDS);
  const int* choices = (const int*)(x_smem + (many ? num_token_tiles(T) * TOKENS_MMA * X_ROW : 0));
  u32 x_barriers = smem_address(barriers + 2);
  Exchange exchange{smem_address(partials), smem_address(choices), smem_address(barriers),
                    smem_address(barriers + 1)};
  if (threadIdx.x == 0) init_barriers(exchange, map, x_barriers, cta_rank);
  cluster_arrive();
  WeightFragments fragments(weight, cta_rank, warp, lane);
  float bias[LANE_EXPERTS];
  load_bias(bias, correction_bias, lane);
  if (cta_rank == 0)
    for (int i = threadIdx.x; i < NUM_EXPERTS; i += THREADS)
      ((uint4*)chosen)[i] = make_uint4(0, 0, 0, 0);
  cluster_wait();  // all CTAs have started and initialised their mbarriers
  griddepcontrol_wait();

  if (cta_rank < SLICES && many) {
    multiply_many(fragments, args, exchange, map, x_smem, x_barriers, cta_rank, warp, lane);
  } else if (cta_rank < SLICES) {
    float acc[TILES_PER_WARP][4];
    multiply(acc, fragments, GlobalX(args, cta_rank, lane));
    send_partials(acc, exchange, map, 0, cta_rank, warp, lane);
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
  __syncthreads();  // `chosen` is zero
  mark_tokens(chosen, choices, T);
  list_pairs(args, chosen, choices);
  int used = list_tiles(args, chosen, warp, lane);
  if (NUM_SHARED > 0) used += list_shared(args, used);
  for (int i = used + threadIdx.x; i < max_tiles; i += THREADS) tiles[2 * max_tiles + i] = 0;
}
