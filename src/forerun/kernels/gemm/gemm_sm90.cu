// Products on Hopper. gemm_sm90.py says how they work; it defines, above this text,
//   GROUPS BN STAGES CLUSTER BAND MAX_ROWS OUT_ROW, as 0 or 1 PAIRED PARTIALS BEST SCALED_IN ADD
//   SCALED_OUT BIAS, and multiply(acc, x, w): one wgmma of 64 rows, BN columns, 16 deep.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BM = 64 * GROUPS;                // rows of x in a tile
constexpr int CHUNK = 64;                      // columns of both: 128 bytes, as wide as the swizzle
constexpr int X_STAGE = BM * 128, W_STAGE = BN * 128;  // bytes
constexpr int RING = STAGES * (X_STAGE + W_STAGE);
constexpr int WIDTH = PAIRED ? BN / 2 : BN;    // columns of the result in a tile
constexpr int OUT_WARP = BEST ? 0 : 16 * OUT_ROW;

// What the L2 cache is asked to do with what passes through it.
constexpr u64 KEEP = 0x1000000000000000, STREAM = 0x12f0000000000000;

struct alignas(64) Map { unsigned char bytes[128]; };

__device__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// --- barriers ------------------------------------------------------------------------------------

__device__ void init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

__device__ void expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(bar), "r"(bytes) : "memory");
}

__device__ void arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// At the same place in another program of the cluster.
__device__ void arrive_at(u32 bar, int rank) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(bar), "r"(rank) : "memory");
}

__device__ void wait(u32 bar, int parity) {
  int done;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}

// Of the threads alone: what they wrote to memory is not waited for.
__device__ void cluster_sync() {
  if (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
  else
    __syncthreads();
}

__device__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- copies, tensor cores, numbers ---------------------------------------------------------------

// A block of a matrix, to this program or to all of its cluster.
template <bool ALL>
__device__ void copy(u32 to, const Map& map, int column, int row, u32 bar, u64 policy) {
  if constexpr (ALL)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(bar), "h"((u16)((1 << CLUSTER) - 1)),
        "l"(policy) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(bar), "l"(policy) : "memory");
}

// A tile of 128-byte rows in the 128-byte swizzle, as wgmma names it: 8 rows are 1,024 bytes.
__device__ u64 operand(u32 at) {
  return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

template <int LEFT>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
__device__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// --- who does what -------------------------------------------------------------------------------

// A cluster's share: units of CLUSTER tiles below one another and one of `split` parts of K.
struct Work {
  int units, groups_m, split, chunks, cluster, clusters, rank;
  int last, rows;  // the last row at which a tile may begin, and rows of a tile that there are
  // x: tiles down the rows, y: along W. Down first, with BAND not further than so many clusters.
  __device__ int2 place(int unit) const {
    unit /= split;
    if (BAND == 0) return make_int2(unit % groups_m, unit / groups_m);
    int along = units / split / groups_m, band = unit / (BAND * along), left = unit % (BAND * along);
    int down = min(BAND, groups_m - band * BAND);
    return make_int2(band * BAND + left % down, left / down);
  }
  // The last tiles may overlap: blocks that reach past the end are slow to copy.
  __device__ int row(int unit) const {
    return min((place(unit).x * CLUSTER + rank) * BM, last);
  }
  __device__ int tile(int unit) const { return place(unit).y; }
  __device__ int part(int unit) const { return unit % split; }
};

struct Ring {
  u32 x, w, full_bars, empty_bars;
  __device__ u32 full(int stage) const { return full_bars + 8 * stage; }
  __device__ u32 empty(int stage) const { return empty_bars + 8 * stage; }
};

struct Turn {
  int stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == STAGES) { stage = 0; parity ^= 1; }
  }
};

// Each program of a cluster loads a part of W's rows for all.
__device__ void load_weight(const Map& map, const Ring& ring, const Work& work, int N) {
  constexpr int HALVES = 1 + PAIRED, SLICE = WIDTH / CLUSTER;
  u64 policy = work.groups_m == 1 ? STREAM : KEEP;  // read once, or again for the rows below
  Turn turn;
  for (int unit = work.cluster; unit < work.units; unit += work.clusters) {
    int row = work.tile(unit) * WIDTH + work.rank * SLICE;
    int column = work.part(unit) * work.chunks * CHUNK;
    for (int i = 0; i < work.chunks; i++, turn.next(), column += CHUNK) {
      u32 bar = ring.full(turn.stage);
      wait(ring.empty(turn.stage), turn.parity ^ 1);
      expect(bar, W_STAGE);
      u32 to = ring.w + turn.stage * W_STAGE + work.rank * SLICE * 128;
      for (int half = 0; half < HALVES; half++)  // gate, then up
        copy<(CLUSTER > 1)>(to + half * WIDTH * 128, map, column, row + half * N, bar, policy);
    }
  }
}

__device__ void load_rows(const Map& map, const Ring& ring, const Work& work) {
  wait_for_kernel_before();
  Turn turn;
  for (int unit = work.cluster; unit < work.units; unit += work.clusters) {
    int row = work.row(unit), column = work.part(unit) * work.chunks * CHUNK;
    for (int i = 0; i < work.chunks; i++, turn.next(), column += CHUNK) {
      u32 bar = ring.full(turn.stage);
      wait(ring.empty(turn.stage), turn.parity ^ 1);
      expect(bar, work.rows * 128);
      copy<false>(ring.x + turn.stage * X_STAGE, map, column, row, bar, KEEP);
    }
  }
}

// Of every row: 1 / sqrt(mean r² + eps), from the sums of r² that the product before left.
__device__ void row_factors(const float* squares, int parts, float eps, int M, int K,
                            float* factors, int thread, u32 ready) {
  wait_for_kernel_before();
  for (int row = thread; row < M; row += 64) {
    float sum = 0.f;
#pragma unroll 32
    for (int i = 0; i < parts; i++) sum += squares[i * M + row];
    factors[row] = rsqrtf(sum / K + eps);
  }
  arrive(ready);
}

// --- results -------------------------------------------------------------------------------------

struct Result {
  void* out;            // [M, N] bf16; PARTIALS [split, M, N] float; BEST [M, tiles over N] float
  int* best_ids;        // [M, tiles over N]
  const u32* bias;      // [N] bf16, PAIRED [2 N]
  const u32* residual;  // [M, N] bf16
  const u32* norm;      // [N] bf16
  u32* scaled;          // [M, N] bf16
  float* out_squares;   // [tiles over N, M]
  int M, N;
};

// A thread's sums: columns 8 j + 2 (lane % 4) and the next, of rows lane / 4 and, half 1, that + 8.
struct Pair { float a, b; };

__device__ Pair sums(const float* acc, float factor, const Result& r, int column) {
  Pair pair{acc[0] * factor, acc[1] * factor};
  if (BIAS && column < (PAIRED ? 2 : 1) * r.N) {
    u32 bias = r.bias[column / 2];
    pair.a += low(bias), pair.b += high(bias);
  }
  return pair;
}

__device__ Pair finished(const float (&acc)[BN / 2], int j, int half, float factor,
                         const Result& r, int column) {
  Pair gate = sums(acc + 4 * j + 2 * half, factor, r, column);
  if (!PAIRED) return gate;
  Pair up = sums(acc + BN / 4 + 4 * j + 2 * half, factor, r, r.N + column);
  return {silu(gate.a) * up.a, silu(gate.b) * up.b};
}

// Each row's largest after rounding, and the lowest id of equals.
__device__ void find_best(const float (&acc)[BN / 2], const Result& r, int m, int tile,
                          const float* factors) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = m + lane / 4 + 8 * half, column = tile * BN + lane % 4 * 2;
    float factor = SCALED_IN && row < r.M ? factors[row] : 1.f;
    float best = __int_as_float(0xff800000);
    int id = 0x7fffffff;
#pragma unroll
    for (int j = 0; j < BN / 8; j++, column += 8) {
      Pair pair = finished(acc, j, half, factor, r, column);
      u32 both = pack(pair.a, pair.b);
      if (column < r.N && low(both) > best) { best = low(both); id = column; }
      if (column < r.N && high(both) > best) { best = high(both); id = column + 1; }
    }
    for (int by = 1; by < 4; by *= 2) {
      float other = __shfl_xor_sync(~0u, best, by);
      int other_id = __shfl_xor_sync(~0u, id, by);
      if (other > best || (other == best && other_id < id)) { best = other; id = other_id; }
    }
    if (row < r.M && lane % 4 == 0) {
      int place = row * ((r.N + BN - 1) / BN) + tile;
      ((float*)r.out)[place] = best;
      r.best_ids[place] = id;
    }
  }
}

// A warp's 16 rows, 32 columns at a time through shared memory, so that neighbours are written
// together: 8 threads a row.
__device__ void store(const float (&acc)[BN / 2], const Result& r, int m, int tile, int part,
                      const float* factors, float* room) {
  int lane = threadIdx.x % 32;
  float factor[2], squares[4] = {};
  for (int half = 0; half < 2; half++) {
    int row = m + lane / 4 + 8 * half;
    factor[half] = SCALED_IN && row < r.M ? factors[row] : 1.f;
  }
#pragma unroll
  for (int first = 0; first < WIDTH; first += 32) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4 && first + 8 * j < WIDTH; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int column = 8 * j + lane % 4 * 2, whole = tile * WIDTH + first + column;
        Pair pair = finished(acc, first / 8 + j, half, factor[half], r, whole);
        *(float2*)(room + (lane / 4 + 8 * half) * OUT_ROW + column) = make_float2(pair.a, pair.b);
      }
    __syncwarp();
    int inside = first + lane % 8 * 4, column = tile * WIDTH + inside;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = m + 4 * i + lane / 8;
      if (row >= r.M || column >= r.N || inside >= WIDTH) continue;
      float4 v = *(const float4*)(room + (4 * i + lane / 8) * OUT_ROW + lane % 8 * 4);
      u64 at = (u64)row * r.N + column;
      if (PARTIALS) {
        *(float4*)((float*)r.out + (u64)part * r.M * r.N + at) = v;
        continue;
      }
      if (ADD) {
        uint2 before = *(const uint2*)(r.residual + at / 2);
        v.x += low(before.x), v.y += high(before.x), v.z += low(before.y), v.w += high(before.y);
      }
      uint2 rounded = make_uint2(pack(v.x, v.y), pack(v.z, v.w));
      *(uint2*)((u32*)r.out + at / 2) = rounded;
      if (SCALED_OUT) {
        uint2 weight = *(const uint2*)(r.norm + column / 2);
        float a = low(rounded.x), b = high(rounded.x), c = low(rounded.y), d = high(rounded.y);
        squares[i] += a * a + b * b + c * c + d * d;
        *(uint2*)(r.scaled + at / 2) =
            make_uint2(pack(a * low(weight.x), b * high(weight.x)),
                       pack(c * low(weight.y), d * high(weight.y)));
      }
    }
  }
  if (SCALED_OUT)
    for (int i = 0; i < 4; i++) {
      float sum = squares[i];
      for (int by = 1; by < 8; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
      int row = m + 4 * i + lane / 8;
      if (row < r.M && lane % 8 == 0) r.out_squares[tile * r.M + row] = sum;
    }
}

// A stage has been read: whoever loads W for this program may load again.
__device__ void release(const Ring& ring, int stage) {
  int i = threadIdx.x % 128;
  if (CLUSTER == 1) {
    if (i == 0) arrive(ring.empty(stage));
  } else if (i < CLUSTER) {
    arrive_at(ring.empty(stage), i);
  }
}

// 64 rows of every tile of this program.
__device__ void multiply_group(const Ring& ring, const Work& work, const Result& result, int group,
                               u32 ready, const float* factors, float* room) {
  wait_for_kernel_before();
  Turn turn;
  for (int unit = work.cluster; unit < work.units; unit += work.clusters) {
    float acc[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; i++) acc[i] = 0.f;
    int before = 0;
    for (int i = 0; i < work.chunks; i++) {
      wait(ring.full(turn.stage), turn.parity);
      u64 x = operand(ring.x + turn.stage * X_STAGE + group * 64 * 128);
      u64 w = operand(ring.w + turn.stage * W_STAGE);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < CHUNK / 16; k++) multiply(acc, x + 2 * k, w + 2 * k);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      // One chunk stays under way; the one before it has been read.
      wait_for_products<1>();
      if (i > 0) release(ring, before);
      before = turn.stage;
      turn.next();
    }
    wait_for_products<0>();
    release(ring, before);
#pragma unroll
    for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
    if (SCALED_IN) wait(ready, 0);  // not sooner: it takes as long as some chunks
    int m = work.row(unit) + group * 64 + threadIdx.x / 32 % 4 * 16;  // the warp's rows
    if (BEST) find_best(acc, result, m, work.tile(unit), factors);
    else store(acc, result, m, work.tile(unit), work.part(unit), factors, room);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (1 + GROUPS), 1)
product(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, void* out,
        int* best_ids, const u32* bias, const u32* residual, const u32* norm, u32* scaled,
        float* out_squares, const float* squares, int parts, float eps, int M, int N, int K,
        int units, int groups_m, int split, int chunks) {
  asm volatile("griddepcontrol.launch_dependents;");
  extern __shared__ unsigned char shared[];
  u32 base = (address(shared) + 1023) & ~1023u;
  float* rooms = (float*)(shared + (base - address(shared)) + RING);
  float* factors = rooms + 4 * GROUPS * OUT_WARP;
  u32 bars = address(factors + (SCALED_IN ? MAX_ROWS : 0)), ready = bars + 16 * STAGES;
  Ring ring{base, base + STAGES * X_STAGE, bars, bars + 8 * STAGES};
  Work work{units, groups_m, split, chunks, (int)blockIdx.x / CLUSTER, (int)gridDim.x / CLUSTER,
            (int)blockIdx.x % CLUSTER, max(M - BM, 0), min(M, BM)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init(ring.full(i), 2);
      init(ring.empty(i), GROUPS * CLUSTER);
    }
    init(ready, 64);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();

  int warp = threadIdx.x / 32;
  if (warp < 4) {
    if (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      if (threadIdx.x == 0) load_weight(w_map, ring, work, N);
    } else if (warp == 1) {
      if (threadIdx.x == 32) load_rows(x_map, ring, work);
    } else if (SCALED_IN) {
      row_factors(squares, parts, eps, M, K, factors, threadIdx.x - 64, ready);
    }
  } else {
    if (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Result result{out, best_ids, bias, residual, norm, scaled, out_squares, M, N};
    float* room = rooms + (warp - 4) * OUT_WARP;
    multiply_group(ring, work, result, warp / 4 - 1, ready, factors, room);
  }
  if (CLUSTER > 1) cluster_sync();  // others may still tell this program's barriers
}
