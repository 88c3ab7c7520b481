// Device primitives of the CUDA C++ kernels for Hopper (sm_90a): mbarriers, named barriers, clusters,
// programmatic dependent launch, cp.async, TMA, wgmma. `nvrtc.py` passes this file to every
// compilation.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// L2 cache policies, encoded as in CUTLASS's TMA::CacheHintSm90.
constexpr u64 EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12f0000000000000;

struct alignas(64) TmaDescriptor { unsigned char bytes[128]; };

__device__ inline u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}

// 16 bytes that no kernel writes, requested before griddepcontrol_wait(). ptxas would move ld.global.nc
// past it.
__device__ inline uint4 load_constant(const u16* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// --- mbarriers -----------------------------------------------------------------------------------

__device__ inline void mbarrier_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

// After the last `mbarrier_init`, before other threads or CTAs of the cluster use the barriers.
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive_expect_tx(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(bar), "r"(bytes) : "memory");
}

__device__ inline void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// The same barrier of another CTA of the cluster.
__device__ inline void mbarrier_arrive_remote(u32 bar, int cta_rank) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(bar), "r"(cta_rank) : "memory");
}

__device__ inline void mbarrier_wait(u32 bar, int phase) {
  int done;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(phase) : "memory");
  } while (!done);
}

// --- named barriers, clusters, programmatic dependent launch -------------------------------------

// Barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads: those that arrive do not wait.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// For the start of a kernel, after mbarrier_init_fence. Execution only: arrive.relaxed orders neither
// global writes nor arrivals at the mbarriers of other CTAs, so it does not serve at a kernel's end.
template <int CTAS>
__device__ void cluster_sync() {
  if (CTAS > 1)
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
  else
    __syncthreads();
}

// The two halves of `cluster_sync`.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Other CTAs of the cluster see what a thread has written before, to global memory too.
__device__ inline void cluster_sync_memory() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The address of the same place in the shared memory of another CTA of the cluster.
__device__ inline u32 remote_smem(u32 smem, int cta_rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem), "r"(cta_rank));
  return remote;
}

// Stores to another CTA's shared memory, and then counts these bytes at its mbarrier, as TMA does.
// Unlike a cluster barrier with release, it does not wait for the thread's writes to global memory.
__device__ inline void store_remote(u32 remote, float a, float b, u32 remote_bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               ::"r"(remote), "f"(a), "f"(b), "r"(remote_bar) : "memory");
}

__device__ inline void store_remote(u32 remote, int value, u32 remote_bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];"
               ::"r"(remote), "r"(value), "r"(remote_bar) : "memory");
}

// PDL: the next kernel may be scheduled.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// PDL: waits until the preceding kernel has finished and its writes are visible.
__device__ inline void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// --- cp.async ------------------------------------------------------------------------------------

// Copies 16 bytes, around L1.
__device__ inline void cp_async_16(u32 smem, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}

// The same, or 16 zeros if not `valid`; `global` is not read then.
__device__ inline void cp_async_16(u32 smem, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(smem), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// Arrives when all earlier cp.async of this thread have completed; counted among the barrier's.
__device__ inline void cp_async_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ inline uint4 load_shared_16(u32 smem) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem) : "memory");
  return v;
}

// --- TMA -----------------------------------------------------------------------------------------

// Loads one box of a tensor into this CTA, or with CTAS > 1 into all CTAs of a cluster of as many.
template <int CTAS = 1>
__device__ void tma_load(u32 smem, const TmaDescriptor& descriptor, int column, int row, u32 bar,
                         u64 cache_policy) {
  if constexpr (CTAS > 1)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;"
        ::"r"(smem), "l"(&descriptor), "r"(column), "r"(row), "r"(bar),
        "h"((u16)((1 << CTAS) - 1)), "l"(cache_policy) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(smem), "l"(&descriptor), "r"(column), "r"(row), "r"(bar), "l"(cache_policy)
        : "memory");
}

// The same from a tensor of three dimensions, of which `depth` is the outermost.
template <int CTAS = 1>
__device__ void tma_load(u32 smem, const TmaDescriptor& descriptor, int column, int row, int depth,
                         u32 bar, u64 cache_policy) {
  if constexpr (CTAS > 1)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;"
        ::"r"(smem), "l"(&descriptor), "r"(column), "r"(row), "r"(depth), "r"(bar),
        "h"((u16)((1 << CTAS) - 1)), "l"(cache_policy) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;"
        ::"r"(smem), "l"(&descriptor), "r"(column), "r"(row), "r"(depth), "r"(bar),
        "l"(cache_policy) : "memory");
}

// The same from a tensor of four dimensions, the innermost first.
__device__ inline void tma_load_4d(u32 smem, const TmaDescriptor& descriptor, int c0, int c1, int c2,
                                   int c3, u32 bar, u64 cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
      ::"r"(smem), "l"(&descriptor), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(bar),
      "l"(cache_policy) : "memory");
}

// Orders this thread's accesses to shared memory before those of TMA and wgmma (async proxy).
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- wgmma ---------------------------------------------------------------------------------------

// wgmma's SMEM matrix descriptors, with 128-byte swizzle: 8 rows of 128 bytes are 1,024 bytes.
// K-major: a row of 64 elements along K. A step of 16 along K adds 2 (32 bytes).
__device__ inline u64 k_major_descriptor(u32 smem) {
  return (u64)((smem & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// MN-major: a row has 64 elements along M or N; the next 64 follow `block_bytes` later. A step of
// 16 along K adds 128 (16 rows).
__device__ inline u64 mn_major_descriptor(u32 smem, u32 block_bytes) {
  return (u64)((smem & 0x3ffff) >> 4) | (u64)(block_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 |
         (u64)1 << 62;
}

// Accumulators as asm text and operands: N / 2 floats a thread for 64 rows and N columns.
#define WGMMA_DIGITS(tens)                                                               \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens \
  "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define WGMMA_REGISTERS_32 WGMMA_DIGITS() WGMMA_DIGITS(1) WGMMA_DIGITS(2) "%30, %31"
#define WGMMA_REGISTERS_64                                                                \
  WGMMA_DIGITS() WGMMA_DIGITS(1) WGMMA_DIGITS(2) WGMMA_DIGITS(3) WGMMA_DIGITS(4)          \
  WGMMA_DIGITS(5) "%60, %61, %62, %63"
#define WGMMA_REGISTERS_128                                                               \
  WGMMA_DIGITS() WGMMA_DIGITS(1) WGMMA_DIGITS(2) WGMMA_DIGITS(3) WGMMA_DIGITS(4)          \
  WGMMA_DIGITS(5) WGMMA_DIGITS(6) WGMMA_DIGITS(7) WGMMA_DIGITS(8) WGMMA_DIGITS(9)         \
  WGMMA_DIGITS(10) WGMMA_DIGITS(11) "%120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_OPERANDS_4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define WGMMA_OPERANDS_16(x, i)                                                           \
  WGMMA_OPERANDS_4(x, i), WGMMA_OPERANDS_4(x, i + 4), WGMMA_OPERANDS_4(x, i + 8),         \
      WGMMA_OPERANDS_4(x, i + 12)
#define WGMMA_OPERANDS_32_AT(x, i) WGMMA_OPERANDS_16(x, i), WGMMA_OPERANDS_16(x, i + 16)
#define WGMMA_OPERANDS_32(x) WGMMA_OPERANDS_32_AT(x, 0)
#define WGMMA_OPERANDS_64(x) WGMMA_OPERANDS_32_AT(x, 0), WGMMA_OPERANDS_32_AT(x, 32)
#define WGMMA_OPERANDS_128(x)                                                             \
  WGMMA_OPERANDS_32_AT(x, 0), WGMMA_OPERANDS_32_AT(x, 32), WGMMA_OPERANDS_32_AT(x, 64),   \
      WGMMA_OPERANDS_32_AT(x, 96)

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads and writes of accumulators across this point.
template <int N>
__device__ void fence_registers(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// --- arithmetic ----------------------------------------------------------------------------------

__device__ inline u32 pack_bf16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Both halves times those of `factors`.
__device__ inline u32 scale_bf16x2(u32 values, u32 factors) {
  u32 scaled;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(values), "r"(factors));
  return scaled;
}

// Bits of two e4m3 numbers, in the upper bytes of both halves -> bfloat16, exact but for NaN. In
// bfloat16's fields the value is 2^-120 of the true one (exponent biases 7 and 127).
__device__ u32 decode_e4m3x2(u32 magnitudes, u32 signs) {
  return scale_bf16x2(magnitudes & 0x07f007f0 | signs & 0x80008000, 0x7b807b80);  // 2^120
}

// Four left operands of wgmma m64k16 from two rows of e4m3 values, in the order of `interleave`.
__device__ void decode_e4m3(u32 (&fragments)[4][4], const uint4 (&w)[2]) {
  const u32 words[2][4] = {{w[0].x, w[0].y, w[0].z, w[0].w}, {w[1].x, w[1].y, w[1].z, w[1].w}};
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int row = 0; row < 2; row++) {
      u32 word = words[row][k];
      fragments[k][row] = decode_e4m3x2(word << 4, word << 8);
      fragments[k][2 + row] = decode_e4m3x2(word >> 4, word);
    }
}
__device__ inline u16 to_bf16(float x) { return (u16)pack_bf16x2(x, 0.f); }
__device__ inline float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ inline float round_bf16(float x) { return from_bf16(to_bf16(x)); }
__device__ inline float low(u32 bf16x2) { return __uint_as_float(bf16x2 << 16); }
__device__ inline float high(u32 bf16x2) { return __uint_as_float(bf16x2 & 0xffff0000u); }

// Triton's division.
__device__ inline float divide(float x, float y) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(y));
  return quotient;
}

// The instructions of Triton's `tl.sigmoid`, so that its kernels give the same bits.
__device__ inline float sigmoid(float x) {
  float exponential;
  asm("ex2.approx.f32 %0, %1;" : "=f"(exponential) : "f"(-x * 1.4426950408889634f));
  return divide(1.f, 1.f + exponential);
}

// The largest of one of a thread's two rows of a wgmma accumulator, whose columns four lanes have.
template <int COUNT>
__device__ float largest_of_row(const float (&s)[COUNT], int half) {
  float a = s[2 * half], b = s[2 * half + 1];
#pragma unroll
  for (int j = 1; j < COUNT / 4; j++) {
    a = fmaxf(a, s[4 * j + 2 * half]);
    b = fmaxf(b, s[4 * j + 2 * half + 1]);
  }
  a = fmaxf(a, b);
  a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
  return fmaxf(a, __shfl_xor_sync(~0u, a, 1));
}

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
