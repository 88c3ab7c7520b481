// A router's logits for few tokens on Hopper (sm_90a), from which the experts' kernel chooses the experts;
// with NORM_PARTS, also the residual addition and RMSNorm before. router_logits_sm90.py explains the
// design, compiles and launches it.
//
// router_logits_sm90.py puts its configuration in front of this file, as macros: those of router_sm90.cu,
// with TILES_PER_WARP 1, and
//   NORM_PARTS  split-K partials whose sum is added to the residual and normed; 0: x is normed already

#ifndef HIDDEN  // opened in an IDE: one consistent configuration
#define HIDDEN 2048
#define NUM_EXPERTS 128
#define SLICE 256
#define TILES_PER_WARP 1
#define TOP_K 8
#define NUM_SHARED 0
#define NUM_GROUPS 1
#define KEPT_GROUPS 1
#define TOP2 0
#define SIGMOID 0
#define NORM 1
#define ROUND_LOGITS 1
#define HAS_BIAS 0
#define NORM_PARTS 4
#endif

#include "router_logits.cuh"
#include "sm90.cuh"
#if NORM_PARTS
#include "rms_norm.cuh"
#endif

constexpr int THREADS = 32 * SLICES, MAX_TOKENS = NORM_PARTS ? 2 : 4;
static_assert(TILES_PER_WARP == 1 && SLICES <= WARPS, "a slice per warp, 8 experts per CTA");

// Adds up the slices, in order. All threads; `acc`: of the warp's slice.
__device__ void store_logits(const float (&acc)[1][4], float* logits, int T, int slice, int lane) {
  __shared__ float partials[SLICES][MAX_TOKENS][EXPERTS_MMA];
  if (lane / 4 < T)
    *(float2*)(partials[slice][lane / 4] + lane % 4 * 2) = make_float2(acc[0][0], acc[0][1]);
  __syncthreads();
  int token = threadIdx.x / EXPERTS_MMA, column = threadIdx.x % EXPERTS_MMA;
  if (token >= T) return;
  float sum = partials[0][token][column];
#pragma unroll
  for (int i = 1; i < SLICES; i++) sum += partials[i][token][column];
  logits[token * ROW + blockIdx.x * EXPERTS_MMA + column] = sum;
}

#if NORM_PARTS
static_assert(WARPS == NORM_SLICES && SLICE == NORM_SLICE, "a warp norms what it multiplies");

// The columns of all tokens that a warp normed, as mma.sync takes them.
struct NormedX {
  const u16* row;
  bool valid;
  __device__ NormedX(const u16 (&x)[MAX_TOKENS][SLICE], int T, int lane)
      : row(x[0] + lane / 4 * SLICE + lane % 4 * 8), valid(lane / 4 < T) {}
  __device__ uint4 load(int half, int offset) const {
    return half == 0 && valid ? *(const uint4*)(row + offset) : make_uint4(0, 0, 0, 0);
  }
};

// total [T, H] = residual + the sum of parts [NORM_PARTS, T, H]; out = its RMSNorm; logits [T, ROW].
// All CTAs compute the norm, and the first one stores it.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
norm_router_logits_sm90_kernel(const float* parts, const u16* residual, const u16* norm_weight,
                               const u16* weight, u16* total, u16* out, float* logits, int T,
                               float eps) {
  griddepcontrol_launch_dependents();
  __shared__ __align__(16) u16 x[WARPS][MAX_TOKENS][SLICE];
  __shared__ float squares[MAX_TOKENS][WARPS];
  int slice = threadIdx.x / 32, lane = threadIdx.x % 32, first = slice * SLICE + lane * 8;
  WeightFragments fragments(weight, slice, blockIdx.x, lane);
  uint4 w = load_constant(norm_weight + first);
  griddepcontrol_wait();

  uint4 r[MAX_TOKENS];
#pragma unroll
  for (int token = 0; token < MAX_TOKENS; token++) {
    if (token >= T) break;
    int offset = token * HIDDEN + first;
    r[token] = add_parts(parts + offset, residual + offset, T);
    float sum = warp_sum(sum_of_squares(r[token]));
    if (lane == 0) squares[token][slice] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int token = 0; token < MAX_TOKENS; token++) {
    if (token >= T) break;
    float inv_rms = rsqrtf(sum_of_warps(squares[token]) / HIDDEN + eps);
    uint4 before = r[token];
    uint4 normed = make_uint4(scale(before.x, inv_rms, w.x), scale(before.y, inv_rms, w.y),
                              scale(before.z, inv_rms, w.z), scale(before.w, inv_rms, w.w));
    *(uint4*)(x[slice][token] + lane * 8) = normed;
    if (blockIdx.x == 0) {
      *(uint4*)(out + token * HIDDEN + first) = normed;
      *(uint4*)(total + token * HIDDEN + first) = before;
    }
  }
  __syncwarp();
  float acc[1][4];
  multiply(acc, fragments, NormedX(x[slice], T, lane));
  store_logits(acc, logits, T, slice, lane);
}
#else

// logits [T, ROW] of x [T, H].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
router_logits_sm90_kernel(const u16* x, const u16* weight, float* logits, int T) {
  griddepcontrol_launch_dependents();
  int slice = threadIdx.x / 32, lane = threadIdx.x % 32;
  WeightFragments fragments(weight, slice, blockIdx.x, lane);
  griddepcontrol_wait();
  float acc[1][4];
  multiply(acc, fragments, GlobalX(x, T, slice, lane));
  store_logits(acc, logits, T, slice, lane);
}
#endif
