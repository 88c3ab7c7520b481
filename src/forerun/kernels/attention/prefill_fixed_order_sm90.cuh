// How a warpgroup of prefill_sm90.cu, which includes this file, attends with the bits of
// `fixed_order.py`: from the first block to the last, in segments.
#pragma once

// What a warpgroup computes of 64 rows: a segment, and the fold of those before it.
struct Output {
  Softmax softmax;
  float o[HEAD_DIM / 2];
  Total<HEAD_DIM / 2> total;

  __device__ void begin_segment() {
    softmax = Softmax();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.f;
  }
  __device__ void end_segment() {
    total.fold(softmax.maxima_sums(), [&](int j) {
      return make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
    });
  }
  __device__ void store(const Tile& tile, const PrefillArguments& args, int first_row) const {
    store_output(total.o, total.softmax, tile, args, first_row);
  }
};

// A block of K and V, in two steps of the softmax. P V of the first runs during the second; that of the
// second, and Q Kᵀ of the next block, during the fold.
template <bool LAST>
__device__ void attend_block(Output& out, float (&s)[BLOCK_N / 2], int block, const Rows& rows,
                             const Tile& tile, u64 q, const Pipelines& pipelines,
                             ConsumerState& state, const PrefillArguments& args) {
  float factor[2];
  float(&first)[BLOCK_N / 4] = *(float(*)[BLOCK_N / 4])s;
  float(&second)[BLOCK_N / 4] = *(float(*)[BLOCK_N / 4])(s + BLOCK_N / 4);
  u32 p[BLOCK_N / 8], v_stage = pipelines.v.stage(state.v.stage);
  wgmma_wait<0>();
  fence_registers(s);
  release(pipelines.k.empty(state.k.stage));
  state.k.advance();
  if ((block + 1) * BLOCK_N > tile.position + 1) mask_scores(s, rows, block * BLOCK_N);
  out.softmax.step(first, args.qk_scale, factor);
  pack_weights(p, first);
  rescale(out.o, factor);
  mbarrier_wait(pipelines.v.full(state.v.stage), state.v.phase);
  if (LAST && is_outside(tile, block)) zero_outside(v_stage, tile, block);
  start_pv(out.o, p, v_stage);
  out.softmax.step(second, args.qk_scale, factor);
  keep_before_wait(out.softmax.sum[0] + out.softmax.sum[1]);
  wgmma_wait<0>();
  fence_registers(out.o);
  pack_weights(p, second);
  rescale(out.o, factor);
  start_pv(out.o, p, v_stage + BLOCK_N / 2 * ROW_BYTES);
  if constexpr (LAST) {
    wgmma_wait<0>();
  } else {
    mbarrier_wait(pipelines.k.full(state.k.stage), state.k.phase);
    start_qk(s, q, pipelines.k.stage(state.k.stage));
    wgmma_wait<1>();
  }
  fence_registers(out.o);
  release(pipelines.v.empty(state.v.stage));
  state.v.advance();
  if (LAST || begins_segment((block + 1) * BLOCK_N)) {
    out.end_segment();
    out.begin_segment();
  }
}

// 64 rows of a tile. The warpgroups take no turns: a block has three products to wait for.
__device__ void attend(Output& out, const Rows& rows, const Tile& tile, u64 q,
                       const Pipelines& pipelines, ConsumerState& state,
                       const PrefillArguments& args, int) {
  float s[BLOCK_N / 2];
  int block = tile.begin_block;
  out.begin_segment();
  mbarrier_wait(pipelines.k.full(state.k.stage), state.k.phase);
  start_qk(s, q, pipelines.k.stage(state.k.stage));
#pragma unroll 1
  for (; block < tile.end_block - 1; block++)
    attend_block<false>(out, s, block, rows, tile, q, pipelines, state, args);
  attend_block<true>(out, s, block, rows, tile, q, pipelines, state, args);
  release(pipelines.q.empty(0));
}
