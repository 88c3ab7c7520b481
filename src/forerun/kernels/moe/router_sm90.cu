// The router of a mixture of experts for up to 128 tokens on Hopper (sm_90a): logits, scores, top-k,
// weights, and the experts' lists of pairs and tiles, in one cluster of 8 CTAs; of more tokens without
// the lists, a cluster per 128 of them. router_sm90.py explains the design, compiles and launches it.
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
//   LOGIT_BIAS                  a bias is added to the logits

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
#define LOGIT_BIAS 0
#endif

#include "router_logits.cuh"
#include "sm90.cuh"
#include "top_k.cuh"

constexpr int CTAS = 8, THREADS = 32 * WARPS;
constexpr int BLOCK_M = 16;     // most pairs of a tile of an expert's list
constexpr int FEW_TOKENS = 2;   // so many are all CTA 0's when experts are chosen
constexpr int MAX_TOKENS = 128, TOKEN_WORDS = MAX_TOKENS / 32;
// x in shared memory: with 64 bytes of padding, two tokens' fragments of a chunk are in all banks.
constexpr int X_ROW = SLICE + 32;                         // elements from token to token
constexpr int X_VECTORS = SLICE / 8;                      // of 8 elements
constexpr int CHOICES = TOP_K + NUM_SHARED;
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
  const u16* logit_bias;         // [E] bf16, with LOGIT_BIAS
  float* weights;                // [T, k + shared]
  int* experts;                  // [T, k + shared]
  int* pairs;                    // [E + shared, T]; null if there are more than one cluster's
  int* tiles;                    // [3, max_tiles]
  int T, max_tiles;
  float factor;
};

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

// A tile of tokens in shared memory, as `GlobalX`.
struct SharedX {
  const u16* row;
  __device__ SharedX(const u16* x, int tile, int lane)
      : row(x + (tile * TOKENS_MMA + lane / 4) * X_ROW + lane % 4 * 8) {}
  __device__ uint4 load(int half, int offset) const {
    return *(const uint4*)(row + 8 * half * X_ROW + offset);
  }
};

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

// Sums of the slices, in order, and of the bias; -inf beyond the experts.
__device__ void sum_slices(float (&logits)[LANE_EXPERTS], const float* partials,
                           const u16* logit_bias, const TokenMap& map, int slot, int lane) {
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) {
    int expert = lane + 32 * j;
    logits[j] = __uint_as_float(0xff800000);
    if (!is_expert(expert)) continue;
    const float* p = partials + map.partial(0, slot, expert / EXPERTS_MMA) + expert % EXPERTS_MMA;
    float sum = p[0];
#pragma unroll
    for (int slice = 1; slice < SLICES; slice++) sum += p[slice * map.slots * ROW];
    if (LOGIT_BIAS) sum += from_bf16(logit_bias[expert]);
    logits[j] = ROUND_LOGITS ? low(pack_bf16x2(sum, 0.f)) : sum;
  }
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
router_sm90_kernel(const u16* x, const u16* weight, const float* correction_bias,
                   const u16* logit_bias, float* weights, int* experts, int* pairs, int* tiles,
                   int T, int max_tiles, float factor) {
  griddepcontrol_launch_dependents();
  __shared__ u64 barriers[2 + MAX_TOKENS / TOKENS_MMA];
  extern __shared__ __align__(16) unsigned char smem[];
  int first_token = blockIdx.x / CTAS * MAX_TOKENS;
  T = min(T - first_token, MAX_TOKENS);
  Arguments args{x + (u64)first_token * HIDDEN, weight, correction_bias, logit_bias,
                 weights + first_token * CHOICES, experts + first_token * CHOICES,
                 pairs, tiles, T, max_tiles, factor};
  int cta_rank = blockIdx.x % CTAS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    multiply(acc, fragments, GlobalX(args.x, T, cta_rank, lane));
    send_partials(acc, exchange, map, 0, cta_rank, warp, lane);
  }
  mbarrier_wait(exchange.partials_barrier, 0);
  for (int slot = warp; slot < map.count(cta_rank); slot += WARPS) {
    float scores[LANE_EXPERTS];
    sum_slices(scores, partials, args.logit_bias, map, slot, lane);
    to_scores(scores);
    choose_experts(args, exchange, scores, bias, map.token(cta_rank, slot), lane);
  }
  if (cta_rank > 0) return;
  mbarrier_wait(exchange.choices_barrier, 0);
  if (pairs == nullptr) return;
  __syncthreads();  // `chosen` is zero
  mark_tokens(chosen, choices, T);
  list_pairs(args, chosen, choices);
  int used = list_tiles(args, chosen, warp, lane);
  if (NUM_SHARED > 0) used += list_shared(args, used);
  for (int i = used + threadIdx.x; i < max_tiles; i += THREADS) tiles[2 * max_tiles + i] = 0;
}
