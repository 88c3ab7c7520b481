// Attention in a fixed order for Hopper (sm_90a): up to 64 query rows (tokens times the query heads of
// a K/V head) against a request's paged K/V, with the bits of `fixed_order.py`. A page holds a block of
// 64 positions. fixed_order_sm90.py explains the design, compiles and launches it.
//
// fixed_order_sm90.py puts macros in front of this file:
//   STAGES        blocks of K and V in shared memory
//   EARLY_STAGES  of these, requested before the preceding kernel has finished
//   CLUSTER_SIZE  CTAs that divide a context

#ifndef STAGES  // opened in an IDE
#define STAGES 4
#define EARLY_STAGES 3
#define CLUSTER_SIZE 1
#endif

#include "attention_sm90.cuh"
#include "fixed_order_sm90.cuh"

constexpr int THREADS = 256, SLOTS = STAGES / 2;  // stages of a warpgroup
static_assert(STAGES % 2 == 0 && EARLY_STAGES <= STAGES, "a warpgroup has every other stage");
// What a warpgroup leaves for the other one: half of its output's columns, maxima and sums. There is
// room for two segments of each.
constexpr int EXCHANGED = 8 + 1, EXCHANGE_BYTES = EXCHANGED * 128 * sizeof(float4);

struct Arguments {
  u16* out;               // [T, Hq, 128] bfloat16
  float* partial;         // of several CTAs [T, Hq, segments, 128]
  float* stats;           // and [T, Hq, segments, 2]: largest score, sum of weights
  const int* page_table;  // [B, page_table_stride]
  const int* start;       // [B]: position of each request's first query token
  const int* first;       // [B + 1] or null: a request's first token; null: it has q_len
  float qk_scale;         // of the scores, times log2(e)
  int kv_heads, group, q_len, row_tiles, segments, page_table_stride;
};

// --- segments ------------------------------------------------------------------------------------

// The segment with which a CTA begins, of those before position `end`.
__device__ int share_begin(int cta, int end) {
  int segments = segment_of(end - 1) + 1, at = end * cta / CLUSTER_SIZE, segment = segment_of(at);
  if (cta >= CLUSTER_SIZE) return segments;
  int middle = (segment_begin(segment) + segment_begin(segment + 1)) / 2;
  int begin = segments <= CLUSTER_SIZE ? cta : at >= middle ? segment + 1 : segment;
  return min(begin, segments);
}

// --- work of a CTA -------------------------------------------------------------------------------

// A tile of a request's rows, a K/V head, and a share of the segments.
struct Work {
  int request, kv_head, cta;
  int token;             // the request's first
  int first_row, rows;   // of the tile, within the request; rows of the request
  int start, end;        // positions of the query tokens
  int full;              // all rows attend to the positions before it
  int segment, segments;  // from, to
};

__device__ Work find_work(const Arguments& args) {
  Work work;
  int i = blockIdx.x, q_len = args.q_len;
  work.cta = i % CLUSTER_SIZE;
  i /= CLUSTER_SIZE;
  work.kv_head = i % args.kv_heads;
  i /= args.kv_heads;
  work.first_row = i % args.row_tiles * TILE_ROWS;
  work.request = i / args.row_tiles;
  work.token = work.request * q_len;
  if (args.first) {
    work.token = args.first[work.request];
    q_len = args.first[work.request + 1] - work.token;
  }
  work.rows = args.group * q_len;
  work.start = args.start[work.request];
  work.end = work.start + q_len;
  work.full = work.start + work.first_row / args.group + 1;
  work.segment = share_begin(work.cta, work.end);
  work.segments = share_begin(work.cta + 1, work.end);
  if (work.first_row >= work.rows) work.segments = work.segment;
  return work;
}

// The blocks of one of the two warpgroups, which has every other segment.
struct Blocks {
  int segment, position, end;  // end: of the context

  __device__ Blocks(const Work& work, int warpgroup)
      : segment(work.segment + warpgroup), position(segment_begin(segment)),
        end(min(work.end, segment_begin(work.segments))) {}
  __device__ bool any() const { return position < end; }
  __device__ bool is_first() const { return position == segment_begin(segment); }
  __device__ bool is_last() const {
    return position + BLOCK_N >= min(segment_begin(segment + 1), end);
  }
  __device__ void advance() {
    if (is_last()) segment += 2, position = segment_begin(segment);
    else position += BLOCK_N;
  }
};

// --- loads: by one thread of each warpgroup ------------------------------------------------------

struct Loader {
  const TmaDescriptor &q_descriptor, &k_descriptor, &v_descriptor;
  const Smem& smem;
  const Arguments& args;
  const Work& work;
  const int* table;  // page ids of the request

  __device__ void load_q() const {
    int token = work.token + work.first_row / args.group;
    load_tile(smem.q(), q_descriptor, 0, work.kv_head * args.group, token, smem.q_full(),
              EVICT_NORMAL);
  }

  __device__ void load_k(int stage, int page) const {
    load_tile(smem.k(stage), k_descriptor, work.kv_head * HEAD_DIM, 0, page, smem.k_full(stage),
              EVICT_FIRST);
  }
  __device__ void load_v(int stage, int page) const {
    load_tile(smem.v(stage), v_descriptor, work.kv_head * HEAD_DIM, 0, page, smem.v_full(stage),
              EVICT_FIRST);
  }

  // Fills a warpgroup's stages, and advances `blocks` past these. With PDL, K/V before `start` was
  // written before the preceding kernel; q and the query tokens' own K/V are written by it.
  __device__ void begin(Blocks& blocks, int warpgroup) const {
    int i = 0;
    for (; i < SLOTS && 2 * i + warpgroup < EARLY_STAGES; i++) {
      if (!blocks.any() || blocks.position + BLOCK_N > work.start) break;
      fill(blocks, 2 * i + warpgroup);
    }
    griddepcontrol_wait();
    if (warpgroup == 0 && work.segment < work.segments) load_q();
    for (; i < SLOTS && blocks.any(); i++) fill(blocks, 2 * i + warpgroup);
  }
  __device__ void fill(Blocks& blocks, int stage) const {
    int page = table[blocks.position / BLOCK_N];
    load_k(stage, page);
    load_v(stage, page);
    blocks.advance();
  }
};

// --- outputs -------------------------------------------------------------------------------------

// Of a row of the request among all: its token times the heads, and its head.
__device__ u64 out_row(const Arguments& args, const Work& work, int row) {
  int heads = args.kv_heads * args.group, head = work.kv_head * args.group + row % args.group;
  return (u64)(work.token + row / args.group) * heads + head;
}

// Two outputs, from weighted values and the sum of weights.
__device__ u32 quotients(float a, float b, float sum) {
  return pack_bf16x2(divide(a, divisor(sum)), divide(b, divisor(sum)));
}

// --- warpgroups ----------------------------------------------------------------------------------

// One of the two warpgroups.
struct Attention {
  const Arguments& args;
  const Smem& smem;
  const Work& work;
  float4* exchange;
  int warpgroup, thread;
  bool active;   // whether a row of the warp is one of the request
  int high[2];   // positions that each row attends to are before it

  __device__ Attention(const Arguments& args, const Smem& smem, const Work& work, float4* exchange)
      : args(args), smem(smem), work(work), exchange(exchange), warpgroup(threadIdx.x / 128),
        thread(threadIdx.x % 128), active(work.first_row + thread / 32 * 16 < work.rows) {
    for (int half = 0; half < 2; half++) high[half] = work.start + row(half) / args.group + 1;
  }

  __device__ int row(int half) const { return work.first_row + tile_row() + 8 * half; }

  __device__ void mask(float (&s)[32], int position) const {
    int column = position + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (column + 8 * j + e >= high[half])
            s[4 * j + 2 * half + e] = __int_as_float(0xff800000);
  }

  // V past the end of the context may be NaN.
  __device__ void clear_values(u32 tile, int position) const {
    for (int i = thread; i < TILE_BYTES / 16; i += 128) {
      int at = i % (PART_BYTES / 16) / 8;
      if (position + at >= work.end)
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(tile + 16 * i), "r"(0)
                     : "memory");
    }
    fence_proxy_async();
    named_barrier_sync(1 + warpgroup, 128);
  }

  // A tile that a wgmma has read may be overwritten once a warp has waited for it: the four warps of
  // the warpgroup have started it together.
  __device__ void attend(Blocks ahead, const Loader& loader, Total<32>& total) {
    float s[32], o[64];
    Softmax softmax;
    Blocks blocks(work, warpgroup);
    bool folds = work.cta == 0;
    if (work.segment < work.segments) mbarrier_wait(smem.q_full(), 0);
#pragma unroll 1
    for (int i = 0; blocks.any(); i++) {
      int stage = i % SLOTS * 2 + warpgroup, phase = i / SLOTS & 1;
      bool loads = thread == 0 && ahead.any();
      int page = loads ? loader.table[ahead.position / BLOCK_N] : 0;
      if (blocks.is_first()) {
        softmax = Softmax();
#pragma unroll
        for (int j = 0; j < 64; j++) o[j] = 0.f;
      }
      mbarrier_wait(smem.k_full(stage), phase);
      start_scores(s, smem.q(), smem.k(stage));
      wgmma_wait<0>();
      fence_registers(s);
      if (loads) loader.load_k(stage, page);
      if (active) {
        if (blocks.position + BLOCK_N > work.full) mask(s, blocks.position);
        float factor[2];
        softmax.step(s, args.qk_scale, factor);
        rescale(o, factor);
      }
      mbarrier_wait(smem.v_full(stage), phase);
      if (blocks.position + BLOCK_N > work.end) clear_values(smem.v(stage), blocks.position);
      start_values(o, s, smem.v(stage));
      wgmma_wait<0>();
      fence_registers(o);
      if (loads) loader.load_v(stage, page);
      if (blocks.is_last()) {
        if (folds)
          give_and_fold(softmax, o, blocks.segment, total);
        else if (active)
          store_segment(softmax, o, blocks.segment);
      }
      blocks.advance();
      ahead.advance();
    }
    if (folds && warpgroup == 1 && (work.segments - work.segment) % 2) {
      named_barrier_sync(3, THREADS);
      fold_other(work.segments - 1, total);
    }
  }

  // What a warpgroup leaves of a segment; of the segments after the next, in the same place.
  __device__ float4* exchanged(int segment) const {
    return exchange + (segment - work.segment) % 4 * EXCHANGED * 128 + thread;
  }

  __device__ void fold_other(int segment, Total<32>& total) const {
    if (!active) return;
    const float4* left = exchanged(segment);
    total.fold(left[8 * 128], [&](int j) { return left[j * 128]; });
  }

  // Folds a segment of this warpgroup and the one of the other, in their order: half of the columns
  // each. The other one has read what this one left two segments before, when both have met again.
  __device__ void give_and_fold(const Softmax& softmax, const float (&o)[64], int segment,
                                Total<32>& total) const {
    float4 stats = softmax.maxima_sums();
    if (active) {
      float4* left = exchanged(segment);
#pragma unroll
      for (int j = 0; j < 8; j++) left[j * 128] = columns(o, j, 1 - warpgroup);
      left[8 * 128] = stats;
    }
    named_barrier_sync(3, THREADS);
    if (warpgroup == 1) fold_other(segment - 1, total);
    if (active) total.fold(stats, [&](int j) { return columns(o, j, warpgroup); });
    if (warpgroup == 0 && segment + 1 < work.segments) fold_other(segment + 1, total);
  }

  // Of one half of the columns.
  __device__ static float4 columns(const float (&o)[64], int j, int half) {
    return half ? make_float4(o[32 + 4 * j], o[33 + 4 * j], o[34 + 4 * j], o[35 + 4 * j])
                : make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
  }

  // `count` / 4 groups of 8 columns from the `begin`th on, of a segment's output, and its maxima and
  // sums.
  template <int COUNT>
  __device__ void store_segment(const Softmax& softmax, const float (&o)[COUNT], int segment,
                                int begin = 0) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (row(half) >= work.rows) continue;
      u64 to = out_row(args, work, row(half)) * args.segments + segment;
      float* out = args.partial + to * HEAD_DIM + begin + thread % 4 * 2;
#pragma unroll
      for (int j = 0; j < COUNT / 4; j++)
        *(float2*)(out + 8 * j) = make_float2(o[4 * j + 2 * half], o[4 * j + 2 * half + 1]);
      if (begin == 0 && thread % 4 == 0)
        *(float2*)(args.stats + 2 * to) = make_float2(softmax.max[half], softmax.sum[half]);
    }
  }

  __device__ void store_output(const Total<32>& total) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (row(half) >= work.rows) continue;
      u16* out = args.out + out_row(args, work, row(half)) * HEAD_DIM + 64 * warpgroup +
                 thread % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; j++)
        *(u32*)(out + 8 * j) = quotients(total.o[4 * j + 2 * half], total.o[4 * j + 2 * half + 1],
                                         total.softmax.sum[half]);
    }
  }
};

// --- several CTAs --------------------------------------------------------------------------------

// Of one row, four columns a thread.
struct FoldedRow {
  float max, sum;
  float4 o;

  __device__ FoldedRow(const Arguments& args, u64 place)
      : max(__ldcg(args.stats + 2 * place)), sum(__ldcg(args.stats + 2 * place + 1)),
        o(__ldcg((const float4*)(args.partial + place * HEAD_DIM) + threadIdx.x % 32)) {}

  __device__ void fold(const FoldedRow& more) {
    float row_max = fmaxf(max, more.max);
    float old = exp2_approx(__fsub_rn(max, row_max)), own = exp2_approx(__fsub_rn(more.max, row_max));
    max = row_max;
    sum = folded(sum, old, more.sum, own);
    o.x = folded(o.x, old, more.o.x, own);
    o.y = folded(o.y, old, more.o.y, own);
    o.z = folded(o.z, old, more.o.z, own);
    o.w = folded(o.w, old, more.o.w, own);
  }
};

// Folds what the CTAs of the cluster have left: the first one the fold of its segments, in the place
// of its first, the others the results of each of theirs. A warp has some of the rows.
__device__ void fold_shares(const Arguments& args, const Work& work) {
  constexpr int AHEAD = 4;  // segments that are requested at once
  int row = work.first_row + work.cta * (THREADS / 32) + threadIdx.x / 32;
  int end_row = min(work.first_row + TILE_ROWS, work.rows);
  int others = share_begin(1, work.end), segments = segment_of(work.end - 1) + 1;
  for (; row < end_row; row += CLUSTER_SIZE * (THREADS / 32)) {
    u64 to = out_row(args, work, row), place = to * args.segments;
    FoldedRow total(args, place);
    for (int segment = others; segment < segments; segment += AHEAD) {
      // Those past the last one are not folded.
      FoldedRow more[AHEAD] = {{args, place + segment},
                               {args, place + min(segment + 1, segments - 1)},
                               {args, place + min(segment + 2, segments - 1)},
                               {args, place + min(segment + 3, segments - 1)}};
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (segment + i < segments) total.fold(more[i]);
    }
    uint2* out = (uint2*)(args.out + to * HEAD_DIM) + threadIdx.x % 32;
    *out = make_uint2(quotients(total.o.x, total.o.y, total.sum),
                      quotients(total.o.z, total.o.w, total.sum));
  }
}

// --- kernel --------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER_SIZE, 1, 1)
fixed_order_sm90_kernel(const __grid_constant__ TmaDescriptor q_descriptor,
                        const __grid_constant__ TmaDescriptor k_descriptor,
                        const __grid_constant__ TmaDescriptor v_descriptor, u16* out,
                        float* partial, float* stats, const int* page_table, const int* start,
                        const int* first, float qk_scale, int kv_heads, int group, int q_len,
                        int row_tiles, int segments, int page_table_stride) {
  griddepcontrol_launch_dependents();
  extern __shared__ unsigned char bytes[];
  u32 address = smem_address(bytes), base = (address + 1023) & ~1023u;
  u32 exchange = base + (1 + 2 * STAGES) * TILE_BYTES;
  Smem smem{base, exchange + 4 * EXCHANGE_BYTES};
  if (threadIdx.x == 0) init_barriers(smem);
  Arguments args{out,      partial, stats, page_table, start,    first,
                 qk_scale, kv_heads, group, q_len,      row_tiles, segments, page_table_stride};
  Work work = find_work(args);
  const int* table = page_table + (u64)work.request * page_table_stride;
  Loader loader{q_descriptor, k_descriptor, v_descriptor, smem, args, work, table};
  __syncthreads();
  int warpgroup = threadIdx.x / 128;
  Blocks ahead(work, warpgroup);
  if (threadIdx.x % 128 == 0) loader.begin(ahead, warpgroup);
  __syncwarp();
  griddepcontrol_wait();
  Attention attention(args, smem, work, (float4*)(bytes + (exchange - address)));
  Total<32> total;  // of all rows half of the columns
  attention.attend(ahead, loader, total);
  if constexpr (CLUSTER_SIZE == 1) {
    attention.store_output(total);
  } else {
    if (work.cta == 0)
      attention.store_segment(total.softmax, total.o, work.segment, 64 * warpgroup);
    cluster_sync_memory();
    fold_shares(args, work);
  }
}
