// The sum of partials, the residual addition and the RMSNorm of few tokens on Hopper (sm_90a): a cluster
// of 8 CTAs per token, a warp per slice of 256 columns. add_rms_norm_sm90.py explains the design, compiles
// and launches it, and puts its configuration in front of this file, as macros: those of rms_norm.cuh.

#ifndef HIDDEN  // opened in an IDE: one consistent configuration
#define HIDDEN 2048
#define NORM_PARTS 8
#endif

#include "rms_norm.cuh"
#include "sm90.cuh"

constexpr int CLUSTER = 8, WARPS = NORM_SLICES / CLUSTER;  // CTAs of a token, warps of a CTA

// total [T, H] = residual + the sum of parts [NORM_PARTS, T, H]; out = its RMSNorm. A CTA may exit when it
// has its sums: the others write into its shared memory only these.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * WARPS, 1)
add_rms_norm_sm90_kernel(const float* parts, const u16* residual, const u16* norm_weight, u16* total,
                         u16* out, int T, float eps) {
  griddepcontrol_launch_dependents();
  __shared__ __align__(16) float squares[NORM_SLICES];
  __shared__ u64 barrier;
  int token = blockIdx.x / CLUSTER, lane = threadIdx.x % 32;
  int slice = blockIdx.x % CLUSTER * WARPS + threadIdx.x / 32;
  int first = slice * NORM_SLICE + lane * 8, offset = token * HIDDEN + first;
  u32 bar = smem_address(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(bar, sizeof(squares));
  }
  cluster_arrive();
  uint4 w = load_constant(norm_weight + first);
  cluster_wait();  // all CTAs have started and initialised their mbarriers
  griddepcontrol_wait();

  uint4 r = add_parts(parts + offset, residual + offset, T);
  float sum = warp_sum(sum_of_squares(r));
  if (lane < CLUSTER)
    store_remote(remote_smem(smem_address(squares + slice), lane), __float_as_int(sum),
                 remote_smem(bar, lane));
  *(uint4*)(total + offset) = r;
  mbarrier_wait(bar, 0);
  float inv_rms = rsqrtf(sum_of_warps(squares) / HIDDEN + eps);
  *(uint4*)(out + offset) = make_uint4(scale(r.x, inv_rms, w.x), scale(r.y, inv_rms, w.y),
                                       scale(r.z, inv_rms, w.z), scale(r.w, inv_rms, w.w));
}
