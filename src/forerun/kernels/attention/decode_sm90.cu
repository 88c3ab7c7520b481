// Split-KV attention for Hopper (sm_90a): up to 64 query rows (tokens times the query heads of a K/V
// head) against a split of a request's paged K/V, for decode and verify steps. A page holds a block
// of 64 positions. decode_sm90.py explains the design, compiles and launches it.
//
// decode_sm90.py puts macros in front of this file:
//   STAGES        blocks of K and V in shared memory
//   EARLY_STAGES  of these, requested before the preceding kernel has finished
//   KV_POLICY     L2 cache policy of K/V loads

#ifndef STAGES  // opened in an IDE
#define STAGES 4
#define EARLY_STAGES 3
#define KV_POLICY EVICT_FIRST
#endif

#include "attention_sm90.cuh"

constexpr int THREADS = 256;
static_assert(STAGES % 2 == 0 && EARLY_STAGES <= STAGES, "a warpgroup has every other stage");
static_assert(STAGES >= 2, "at the end, the stages' memory holds outputs");
constexpr int UNLIMITED = 0x7fffffff;  // window

struct Arguments {
  float* partial;         // [T, Hq, splits, 128]
  float* lse;             // [T, Hq, splits], log2
  const int* page_table;  // [B, page_table_stride]
  const int* start;       // [B]: position of each request's first query token
  const u64* tree;        // [T] or null: bit j: the token attends to token j of its request
  float qk_scale;         // of the scores, times log2(e)
  int kv_heads, group, q_len, row_tiles, num_splits, causal, window, page_table_stride;
};

// --- work of a CTA -------------------------------------------------------------------------------

// A tile of a request's rows, a K/V head, and a split of the positions.
struct Work {
  int request, kv_head, split;
  int first_row, rows;    // of the tile, within the request; rows of the request
  int start, end;         // positions of the query tokens
  int clear, full;        // positions in [clear, full) are attended to by all rows
  int block, num_blocks;  // of 64 positions
};

__device__ Work find_work(const Arguments& args) {
  Work work;
  int i = blockIdx.x;
  work.kv_head = i % args.kv_heads;
  i /= args.kv_heads;
  work.first_row = i % args.row_tiles * TILE_ROWS;
  i /= args.row_tiles;
  work.split = i % args.num_splits;
  work.request = i / args.num_splits;
  work.rows = args.group * args.q_len;
  work.start = args.start[work.request];
  work.end = work.start + args.q_len;
  int first_token = work.first_row / args.group;
  int last_token = (min(work.first_row + TILE_ROWS, work.rows) - 1) / args.group;
  int low = 0;  // the oldest position that a row attends to
  work.clear = 0;
  work.full = args.tree ? work.start : args.causal ? work.start + first_token + 1 : work.end;
  if (args.window != UNLIMITED) {
    low = max(work.start - args.window + (args.causal ? first_token + 1 : 0), 0);
    work.clear = work.start - args.window + (args.causal ? last_token + 1 : 0);
  }
  int base = min(low, work.start) / BLOCK_N;
  int blocks = (work.end - 1) / BLOCK_N + 1 - base;
  int begin = blocks * work.split / args.num_splits;
  work.block = base + begin;
  work.num_blocks = blocks * (work.split + 1) / args.num_splits - begin;
  return work;
}

// The position of a block's first row in shared memory. K/V past `end` may be NaN, so a request's
// last block is moved back to end there; TMA fills rows before the page with zeros.
__device__ int block_origin(const Work& work, int block) {
  return min(block * BLOCK_N, work.end - BLOCK_N);
}

// --- loads: by one thread of each warpgroup ------------------------------------------------------

struct Loader {
  const TmaDescriptor &q_descriptor, &k_descriptor, &v_descriptor;
  const Smem& smem;
  const Arguments& args;
  const Work& work;
  const int* table;  // page ids of the split's blocks

  __device__ void load_q() const {
    int token = work.request * args.q_len + work.first_row / args.group;
    load_tile(smem.q(), q_descriptor, 0, work.kv_head * args.group, token, smem.q_full(),
              EVICT_NORMAL);
  }

  __device__ void load(const TmaDescriptor& descriptor, u32 tile, u32 full, int i,
                       int page) const {
    int block = work.block + i, row = block_origin(work, block) - block * BLOCK_N;
    load_tile(tile, descriptor, work.kv_head * HEAD_DIM, row, page, full, KV_POLICY);
  }
  // Of block i of the split.
  __device__ void load_k(int i, int page) const {
    load(k_descriptor, smem.k(i % STAGES), smem.k_full(i % STAGES), i, page);
  }
  __device__ void load_v(int i, int page) const {
    load(v_descriptor, smem.v(i % STAGES), smem.v_full(i % STAGES), i, page);
  }

  // Fills the stages. With PDL, K/V before `start` was written before the preceding kernel; q and
  // the query tokens' own K/V are written by it.
  __device__ void begin(int warpgroup) const {
    int early = min(EARLY_STAGES, work.start / BLOCK_N - work.block), i = warpgroup;
    for (; i < min(early, work.num_blocks); i += 2) {
      int page = table[i];
      load_k(i, page);
      load_v(i, page);
    }
    griddepcontrol_wait();
    if (warpgroup == 0 && work.num_blocks > 0) load_q();
    for (; i < min(STAGES, work.num_blocks); i += 2) {
      int page = table[i];
      load_k(i, page);
      load_v(i, page);
    }
  }
};

// --- warpgroups ----------------------------------------------------------------------------------

// One of the two warpgroups: it has every other block of the split, and a softmax and an output of its
// own for them.
struct Attention {
  const Arguments& args;
  const Smem& smem;
  const Work& work;
  int low[2], high[2];  // positions that each row attends to, apart from the tree
  // Of the blocks so far, in powers of two; sum: of this thread's columns.
  float max[2] = {-1e38f, -1e38f}, sum[2] = {0.f, 0.f};

  __device__ Attention(const Arguments& args, const Smem& smem, const Work& work)
      : args(args), smem(smem), work(work) {
    for (int half = 0; half < 2; half++) {
      int token = row(half) / args.group;
      high[half] = args.causal ? work.start + token + 1 : work.end;
      int newest = args.causal ? high[half] : work.start;
      low[half] = args.window == UNLIMITED ? 0 : newest - args.window;
    }
  }

  __device__ int row(int half) const { return work.first_row + tile_row() + 8 * half; }

  __device__ void mask(float (&s)[32], int block) const {
    int origin = block_origin(work, block), column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int begin = ::max(low[half], block * BLOCK_N) - origin, end = high[half] - origin;
      int start = work.start - origin;
      u64 bits = 0;
      if (args.tree && row(half) < work.rows)
        bits = args.tree[(u64)work.request * args.q_len + row(half) / args.group];
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          int n = 8 * j + column + e;
          bool visible = n >= begin && n < end;
          if (args.tree && n >= start) visible = visible && (bits >> (n - start & 63) & 1);
          if (!visible) s[4 * j + 2 * half + e] = __int_as_float(0xff800000);
        }
    }
  }

  // s: scores -> weights; the output so far is rescaled to the new maximum.
  __device__ void online_softmax(float (&s)[32], float (&o)[64]) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float row_max = fmaxf(max[half], largest_of_row(s, half) * args.qk_scale);
      factor[half] = exp2_approx(max[half] - row_max);
      max[half] = row_max;
      float a = 0.f, b = 0.f;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float &x = s[4 * j + 2 * half], &y = s[4 * j + 2 * half + 1];
        x = exp2_approx(fmaf(x, args.qk_scale, -row_max));
        y = exp2_approx(fmaf(y, args.qk_scale, -row_max));
        a += x, b += y;
      }
      sum[half] = sum[half] * factor[half] + (a + b);
    }
    // After the first blocks the factors are nearly always 1.
    if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] *= factor[i / 2 % 2];
  }

  // A tile that a wgmma has read may be overwritten once a warp has waited for it: the four warps of
  // the warpgroup have started it together.
  __device__ void attend(float (&o)[64], int warpgroup, const Loader& loader) {
    float s[32];
#pragma unroll 1
    for (int i = warpgroup; i < work.num_blocks; i += 2) {
      int stage = i % STAGES, phase = i / STAGES & 1, block = work.block + i, next = i + STAGES;
      bool loads = threadIdx.x % 128 == 0 && next < work.num_blocks;
      int page = loads ? loader.table[next] : 0;
      if (i == warpgroup) mbarrier_wait(smem.q_full(), 0);
      mbarrier_wait(smem.k_full(stage), phase);
      start_scores(s, smem.q(), smem.k(stage));
      wgmma_wait<0>();
      fence_registers(s);
      if (loads) loader.load_k(next, page);
      if ((block + 1) * BLOCK_N > work.full || block * BLOCK_N < work.clear) mask(s, block);
      online_softmax(s, o);
      mbarrier_wait(smem.v_full(stage), phase);
      start_values(o, s, smem.v(stage));
      wgmma_wait<0>();
      fence_registers(o);
      if (loads) loader.load_v(next, page);
    }
  }

  // Adds up the two warpgroups' results and stores half of the columns. `exchange`: shared memory,
  // 32 KB of outputs and 1 KB of maxima and sums.
  __device__ void store(const float (&o)[64], float4* exchange, int warpgroup) {
    int thread = threadIdx.x % 128;
    float2* stats = (float2*)(exchange + 2 * 8 * 128);  // [2][64]: maximum, sum
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    }
    __syncthreads();  // the stages are free
    float own[32];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float other[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        own[4 * j + e] = warpgroup ? o[32 + 4 * j + e] : o[4 * j + e];
        other[e] = warpgroup ? o[4 * j + e] : o[32 + 4 * j + e];
      }
      exchange[(8 * warpgroup + j) * 128 + thread] =
          make_float4(other[0], other[1], other[2], other[3]);
    }
    if (thread % 4 == 0)
      for (int half = 0; half < 2; half++)
        stats[64 * warpgroup + tile_row() + 8 * half] = make_float2(max[half], sum[half]);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float2 theirs = stats[64 * (1 - warpgroup) + tile_row() + 8 * half];
      float row_max = fmaxf(max[half], theirs.x);
      float a = exp2_approx(max[half] - row_max), b = exp2_approx(theirs.x - row_max);
      float total = sum[half] * a + theirs.y * b, inverse = total == 0.f ? 1.f : 1.f / total;
      if (row(half) >= work.rows) continue;
      int token = row(half) / args.group;
      u64 out_row = ((u64)work.request * args.q_len + token) * args.kv_heads * args.group +
                    work.kv_head * args.group + row(half) % args.group;
      u64 to = out_row * args.num_splits + work.split;
      float* out = args.partial + to * HEAD_DIM + 64 * warpgroup + thread % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float4 x = exchange[(8 * (1 - warpgroup) + j) * 128 + thread];
        float first = half ? x.z : x.x, second = half ? x.w : x.y;
        *(float2*)(out + 8 * j) =
            make_float2((own[4 * j + 2 * half] * a + first * b) * inverse,
                        (own[4 * j + 2 * half + 1] * a + second * b) * inverse);
      }
      if (warpgroup == 0 && thread % 4 == 0)
        args.lse[to] = total == 0.f ? __int_as_float(0xff800000) : row_max + __log2f(total);
    }
  }
};

// --- kernel --------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
decode_sm90_kernel(const __grid_constant__ TmaDescriptor q_descriptor,
                   const __grid_constant__ TmaDescriptor k_descriptor,
                   const __grid_constant__ TmaDescriptor v_descriptor, float* partial, float* lse,
                   const int* page_table, const int* start, const u64* tree, float qk_scale,
                   int kv_heads, int group, int q_len, int row_tiles, int num_splits, int causal,
                   int window, int page_table_stride) {
  griddepcontrol_launch_dependents();
  extern __shared__ unsigned char bytes[];
  u32 address = smem_address(bytes), base = (address + 1023) & ~1023u;
  Smem smem{base, base + (1 + 2 * STAGES) * TILE_BYTES};
  if (threadIdx.x == 0) init_barriers(smem);
  Arguments args{partial, lse,   page_table, start,      tree,   qk_scale, kv_heads,
                 group,   q_len, row_tiles,  num_splits, causal, window,   page_table_stride};
  Work work = find_work(args);
  const int* table = page_table + (u64)work.request * page_table_stride + work.block;
  Loader loader{q_descriptor, k_descriptor, v_descriptor, smem, args, work, table};
  __syncthreads();
  int warpgroup = threadIdx.x / 128;
  if (threadIdx.x % 128 == 0) loader.begin(warpgroup);
  __syncwarp();
  griddepcontrol_wait();
  Attention attention(args, smem, work);
  float o[64];
#pragma unroll
  for (int i = 0; i < 64; i++) o[i] = 0.f;
  attention.attend(o, warpgroup, loader);
  attention.store(o, (float4*)(bytes + (smem.k(0) - address)), warpgroup);
}
