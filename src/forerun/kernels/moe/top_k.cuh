// Scores and top-k of a mixture of experts, a warp per token: for the router's kernel and, with few
// tokens, the experts'. Macros, which router_sm90.cu explains: NUM_EXPERTS, NUM_GROUPS, KEPT_GROUPS,
// TOP2, SIGMOID, HAS_BIAS.
#pragma once

#include "sm90.cuh"

constexpr int LANE_EXPERTS = (NUM_EXPERTS + 31) / 32;     // a lane's: lane, lane + 32, ...
constexpr float NORM_EPS = 1e-20f, NAN_CHOICE = -1e30f;   // scores of NaN are chosen last
constexpr u32 ALL_LANES = 0xffffffff, USED = 0;           // USED: below the key of any float

__device__ inline bool is_expert(int expert) { return NUM_EXPERTS % 64 == 0 || expert < NUM_EXPERTS; }

__device__ inline float load_constant(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

// Keys are ordered as floats are.
__device__ inline u32 to_key(float x) {
  u32 bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffff : 0x80000000);
}
__device__ inline float from_key(u32 key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000 : 0xffffffff));
}

// Loaded before it is needed, as the weight is.
__device__ inline void load_bias(float (&bias)[LANE_EXPERTS], const float* correction_bias, int lane) {
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    bias[j] = HAS_BIAS && is_expert(lane + 32 * j) ? load_constant(correction_bias + lane + 32 * j)
                                                   : 0.f;
}

// Sigmoids, or the softmax over all experts.
__device__ inline void to_scores(float (&values)[LANE_EXPERTS]) {
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
__device__ inline void to_keys(u32 (&keys)[LANE_EXPERTS], const float (&scores)[LANE_EXPERTS],
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
__device__ inline int find_best(const u32 (&keys)[LANE_EXPERTS], int lane, u32& best) {
  u32 key = keys[0], expert = ALL_LANES;
#pragma unroll
  for (int j = 1; j < LANE_EXPERTS; j++) key = max(key, keys[j]);
  best = __reduce_max_sync(ALL_LANES, key);
#pragma unroll
  for (int j = LANE_EXPERTS - 1; j >= 0; j--) expert = keys[j] == best ? lane + 32 * j : expert;
  return __reduce_min_sync(ALL_LANES, expert);
}

__device__ inline void mark_used(u32 (&keys)[LANE_EXPERTS], int expert, int lane) {
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    keys[j] = expert == lane + 32 * j ? USED : keys[j];
}

__device__ inline int group_of(int expert) { return expert / (NUM_EXPERTS / NUM_GROUPS); }

// The score of a group: its best choice, or the sum of the two best. The same in all lanes.
__device__ inline float group_score(const u32 (&keys)[LANE_EXPERTS], int group, int lane) {
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
__device__ inline void keep_best_groups(u32 (&keys)[LANE_EXPERTS], int lane) {
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
__device__ inline float score_of(const float (&scores)[LANE_EXPERTS], int expert, int lane) {
  float score = 0.f;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) score = expert == lane + 32 * j ? scores[j] : score;
  return __shfl_sync(ALL_LANES, score, expert % 32);
}
