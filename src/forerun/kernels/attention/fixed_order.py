# mypy: allow-untyped-defs, allow-incomplete-defs
"""Paged attention whose result for a token depends on the tokens before it alone, to the last bit.

Neither the batch, nor how many tokens of a request run at once, nor page size or cache state
changes a sum. Positions are divided into segments whose bounds are constants (`segment_begin`).
Each segment has a softmax of its own, over blocks of positions in their order; the segments'
results are folded from the first to the last (`fold`). Whether one CTA folds them in registers, as
for prompts and large batches, or the first of several CTAs begins and a second kernel goes on, the
operations are the same, and so is the tile's arithmetic: decode, verify and prefill have one tile
shape.

Positions that a row does not see leave its result as it is: a masked score weighs exactly 0, and a
block or a segment without a visible one multiplies by exactly 1. So rows of a tile may differ in
what they see.

On Hopper `fixed_order_sm90.py` computes the same bits for decode and verify passes, and
`prefill_sm90.py` for prompts.

A tree's tokens lie in the pool in the order of their nodes. Each is computed as the last token of
the chain of its ancestors (`TreePaths`): the blocks from that of the first query token on are
gathered along its path, node after node, with the rows of other nodes masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.attention import decode_sm90, fixed_order_sm90, prefill_sm90
from forerun.kernels.attention.decode import (
    CAUSAL,
    LOG2E,
    PREFETCH_LEN,
    TREE,
    MaskSpec,
    needs_int64_offsets,
)
from forerun.kernels.attention.decode_kernels import (
    attends,
    begin_softmax,
    cast_q,
    kv_slots_of,
    load_kv,
    load_page_ids,
    online_softmax_step,
    prefetch_kv,
    tanh_of,
    tokens_of,
)
from forerun.kernels.attention.fixed_order_sm90 import FixedOrderArguments
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.attention.tile_map import TileMap
from forerun.kernels.attention.tiles import (
    TileConfig,
    fixed_order_tile,
    lone_fixed_order_stages,
)
from forerun.kernels.runtime.fp8 import as_bits, fp8_mode
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from forerun.kernels.runtime.jit import jit, tl, triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.speculation.ragged import RaggedRows
from forerun.kernels.speculation.tree import unpack_bits

SHARED_STAGES = 2  # of a CTA that shares its SM (Hopper) with another
FOLD_SIZE = 2048  # elements of a segment's results that a CTA of the second kernel folds at once
FOLD_AHEAD = 8  # segments whose results it requests at once


@dataclass(frozen=True, eq=False)
class TreePaths:
    """The way from the root to each of T nodes; of B trees of W nodes each."""

    nodes: Tensor  # [T, W] int32, contiguous: its ancestors from the root on, then itself
    depth: Tensor  # [T] int32: how many ancestors it has

    @classmethod
    def of(cls, tree: Tensor, count: int) -> TreePaths:
        """tree [T, words] int64, bit j: node j is an ancestor, or the node itself; `count`: W."""
        own = unpack_bits(tree, count)
        nodes = (~own).byte().argsort(dim=1, stable=True)  # parents come before their children
        return cls(nodes.int(), own.sum(1, dtype=torch.int32) - 1)


def num_segments(positions: int) -> int:
    """How many segments the first `positions` positions have; see `segment_of`."""
    last = max(positions, 1) - 1
    if last < 4096:
        return last // 128 + 1
    return (last - 4096) // 1024 + 33 if last < 16384 else (last - 16384) // 4096 + 45


def choose_ctas(gpu: GpuInfo, tiles: int, positions: int, per_sm: int = 1) -> int:
    """CTAs among which a context of at most `positions` is divided; 1: one CTA folds all of it.

    A CTA for every segment if `per_sm` of them, or two, fit on an SM; else so many that every SM
    has at most `per_sm`: a segment's results cost more to store than CTAs gain that wait for
    others. The number changes where sums are computed, not how.
    """
    if tiles >= gpu.num_sms:
        return 1
    segments = num_segments(positions)
    if tiles * segments <= max(per_sm, 2) * gpu.num_sms:
        return segments
    return per_sm * gpu.num_sms // tiles


def fixed_order_attention(
    q: Tensor,
    kv: PagedKV,
    q_len: int,
    mask: MaskSpec,
    scale: float,
    kv_len_ub: int,
    paths: TreePaths | None = None,
) -> Tensor:
    """Attention of `q_len` tokens for each of B requests; their K/V is in the pool already.

    What is read before the kernel waits for its predecessor, and when: as in `paged_attention`.

    Args:
        q: [T, Hq, D], T = B * q_len without `kv.rows`; tokens at any stride.
        kv: the cache.
        q_len: tokens per request, or at most.
        mask: causal, or a tree.
        scale: of the scores.
        kv_len_ub: the longest context, query tokens included, that a request may have.
        paths: of a tree, all of its B * q_len nodes.

    Returns:
        [T, Hq, D] in q's dtype.
    """
    assert (mask.mask == TREE) == (paths is not None)
    total, heads, dim = q.shape
    gpu, segments = gpu_of(q.device), num_segments(kv_len_ub)
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    partial = stats = out
    on_hopper = sm90_ctas(gpu, q, kv, q_len, mask, kv_len_ub)
    ctas = on_hopper or _triton_ctas(gpu, q, kv, q_len, kv_len_ub)
    if ctas > 1:
        shape = (total, heads, segments)
        partial = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    if on_hopper:
        args = FixedOrderArguments(q, kv, out, partial, stats, q_len, scale * LOG2E, ctas, segments)
        fixed_order_sm90.launch(args)
        return out
    _launch_step(_Step(q, kv, q_len, mask, scale, paths, segments), partial, stats, ctas)
    if ctas > 1:
        fold_segments(partial, stats, out, StepTokens(kv.start, q_len, kv.rows), mask, ctas)
    return out


def sm90_ctas(
    gpu: GpuInfo, q: Tensor, kv: PagedKV, q_len: int, mask: MaskSpec, kv_len_ub: int
) -> int:
    """CTAs among which `fixed_order_sm90.py` divides a context, one per SM; 0: it does not serve.

    Beyond one tile per SM, two of the Triton kernel's CTAs on an SM read as fast.
    """
    group = q.shape[1] // kv.num_kv_heads
    if gpu.amd or gpu.interpreted or gpu.capability != 90 or not _is_plain(mask):
        return 0
    if decode_sm90.why_unfit(q.dtype, kv.k.dtype, q.shape[2], kv.page_size, group) is not None:
        return 0
    tiles = kv.start.shape[0] * kv.num_kv_heads * fixed_order_sm90.row_tiles(group, q_len)
    most = min(gpu.num_sms // tiles, fixed_order_sm90.MAX_CTAS)
    return min(choose_ctas(gpu, tiles, kv_len_ub), most)


def _is_plain(mask: MaskSpec) -> bool:
    """Whether it is what the kernels in CUDA C++ compute."""
    more = mask.window, mask.softcap, mask.sinks
    return mask.mask == CAUSAL and all(x is None for x in more)


def _triton_ctas(gpu: GpuInfo, q: Tensor, kv: PagedKV, q_len: int, kv_len_ub: int) -> int:
    rows = q.shape[1] // kv.num_kv_heads * q_len
    row_tiles = triton.cdiv(rows, fixed_order_tile(gpu, q.shape[2], q.dtype).block_m)
    return choose_ctas(gpu, kv.start.shape[0] * kv.num_kv_heads * row_tiles, kv_len_ub)


@dataclass(frozen=True, eq=False)
class _Step:
    """Arguments of `fixed_order_attention`, for the Triton kernel."""

    q: Tensor
    kv: PagedKV
    q_len: int
    mask: MaskSpec
    scale: float
    paths: TreePaths | None
    segments: int  # that a context may have


def _launch_step(step: _Step, partial: Tensor, stats: Tensor, ctas: int) -> None:
    """Fills `partial`, the output if one CTA has a context, and `stats`."""
    q, kv, q_len, mask, paths = step.q, step.kv, step.q_len, step.mask, step.paths
    gpu, (_, heads, dim) = gpu_of(q.device), q.shape
    tile = fixed_order_tile(gpu, dim, q.dtype)
    group, batch = heads // kv.num_kv_heads, kv.start.shape[0]
    row_tiles = triton.cdiv(group * q_len, tile.block_m)
    stages = tile.num_stages
    if ctas * batch * kv.num_kv_heads * row_tiles <= gpu.num_sms:
        stages = lone_fixed_order_stages(gpu, dim, q.dtype, kv.k.dtype)
    elif ctas > 1:
        stages = min(stages, SHARED_STAGES)
    _step_kernel[(kv.num_kv_heads * row_tiles, ctas, batch)](
        q, as_bits(kv.k), as_bits(kv.v), partial, stats, kv.page_table, kv.start,
        None if kv.rows is None else kv.rows.first,
        q if paths is None else paths.nodes, q if paths is None else paths.depth,
        mask.sinks, mask.qk_scale(step.scale),
        q.stride(0), q.stride(1), kv.page_table.stride(0), step.segments,
        GROUP=group, KV_HEADS=kv.num_kv_heads, Q_LEN=q_len, PREFETCH_LEN=PREFETCH_LEN,
        WHOLE=ctas == 1, TREE=paths is not None, STAGES=stages, **_constants(q, kv, mask, tile),
        num_warps=tile.num_warps, num_stages=stages, **pdl_options(q),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The query tokens of a step: `q_len` of each request, or with `rows` at most so many."""

    start: Tensor  # [B] int32, position of each request's first
    q_len: int
    rows: RaggedRows | None = None


def fold_segments(
    partial: Tensor, stats: Tensor, out: Tensor, tokens: StepTokens, mask: MaskSpec, ctas: int
) -> None:
    """Fills out [T, Hq, D] from what a step's CTAs have left.

    The first CTA of a context: the fold of its segments, in the place of the first one's results.
    The others: the results of each of theirs.

    Args:
        partial: [T, Hq, segments, D] float32, weighted values.
        stats: [T, Hq, segments, 2] float32, largest score and sum of weights.
        tokens: of the step.
        mask: of the step.
        ctas: among which each context was divided.
    """
    rows_of = tokens.rows
    total, heads, segments, dim = partial.shape
    rows, block_d = total * heads, triton.next_power_of_2(dim)
    filling = triton.next_power_of_2(triton.cdiv(rows, 4 * gpu_of(out.device).num_sms))
    block_rows = max(1, min(filling, FOLD_SIZE // block_d))
    _fold_kernel[(triton.cdiv(rows, block_rows),)](
        partial, stats, out, tokens.start, None if rows_of is None else rows_of.first,
        None if rows_of is None else rows_of.places, rows, segments, ctas,
        NUM_HEADS=heads, Q_LEN=tokens.q_len, WINDOW=mask.window_constant, DIM=dim,
        BLOCK_ROWS=block_rows, BLOCK_D=block_d, AHEAD=FOLD_AHEAD,
        num_warps=1 if block_rows * block_d <= 512 else 4, **pdl_options(out),
    )  # fmt: skip


def fixed_order_prefill(
    q: Tensor, kv: PagedKV, tile_map: TileMap, mask: MaskSpec, scale: float
) -> Tensor:
    """Attention of ragged chunks; their K/V is in the pool already.

    Args:
        q: [T, Hq, D]; tokens at any stride.
        kv: the cache.
        tile_map: with at most `prefill_tile_config(...).block_m // group` tokens per tile, of which
            the Triton kernel makes several.
        mask: causal.
        scale: of the scores.

    Returns:
        [T, Hq, D] in q's dtype.
    """
    total, heads, dim = q.shape
    gpu, group = gpu_of(q.device), heads // kv.num_kv_heads
    need = gpu, q.dtype, kv.k.dtype, dim, kv.page_size
    if _is_plain(mask) and prefill_sm90.why_unfit(*need) is None:
        return prefill_sm90.launch(q, kv, tile_map, mask, scale, fixed_order=True)
    tile = fixed_order_tile(gpu, dim, q.dtype)
    tokens = tile.block_m // group
    assert tokens > 0, "a tile has no room for its heads"
    parts = triton.cdiv(tile_map.tokens_per_tile, tokens)
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    _chunk_kernel[(kv.num_kv_heads * parts, tile_map.entries.shape[0])](
        q, as_bits(kv.k), as_bits(kv.v), out, kv.page_table, kv.start, tile_map.entries,
        mask.sinks, mask.qk_scale(scale), q.stride(0), q.stride(1), kv.page_table.stride(0),
        MAP_TOKENS=tile_map.tokens_per_tile, TILE_TOKENS=tokens, GROUP=group,
        KV_HEADS=kv.num_kv_heads, STAGES=tile.num_stages, **_constants(q, kv, mask, tile),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _constants(q: Tensor, kv: PagedKV, mask: MaskSpec, tile: TileConfig) -> dict[str, Any]:
    """Constexprs that both kernels over positions take."""
    dim = q.shape[2]
    return {
        "DIM": dim,
        "PAGE_SIZE": kv.page_size,
        "WINDOW": mask.window_constant,
        "FP8": fp8_mode(kv.k),
        "INT64_OFFSETS": needs_int64_offsets(kv.k),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": triton.next_power_of_2(dim),
        "SOFTCAP": mask.softcap_constant,
    }


@jit
def segment_begin(segment):
    """The first position of a segment: 32 of 128 positions, 12 of 1,024, then 4,096 each."""
    middle = 4096 + (segment - 32) * 1024
    last = 16384 + (segment - 44) * 4096
    return tl.where(segment < 32, segment * 128, tl.where(segment < 44, middle, last))


@jit
def segment_of(position):
    """The segment that a position lies in."""
    middle = 32 + (position - 4096) // 1024
    last = 44 + (position - 16384) // 4096
    return tl.where(position < 4096, position // 128, tl.where(position < 16384, middle, last))


@jit
def share_begin(cta, ctas, start, last, WINDOW: tl.constexpr):
    """The segment with which one of `ctas` begins that divide a context; the next one's: its end.

    The context is that of query tokens at `start` to `last`. A CTA has one segment while there are
    no more than CTAs, else about as many positions as the others.
    """
    first, end = segment_of(oldest(start, WINDOW)), segment_of(last) + 1
    low = segment_begin(first)
    at = low + (last + 1 - low) * cta // ctas
    segment = segment_of(at)
    middle = (segment_begin(segment) + segment_begin(segment + 1)) // 2
    nearest = tl.where(at >= middle, segment + 1, segment)
    begin = tl.where(end - first <= ctas, first + cta, nearest)
    return tl.where(cta < ctas, tl.minimum(begin, end), end)


@jit
def fold(total_max, total_sum, total, row_max, row_sum, acc):
    """Adds a segment's results to those of the segments before it: [M], [M], [M, D] each.

    The multiplications are fused as written, whichever kernel folds.
    """
    new = tl.maximum(total_max, row_max)
    old, own = tl.exp2(total_max - new), tl.exp2(row_max - new)
    total_sum = tl.fma(total_sum, old, row_sum * own)
    total = tl.fma(total, tl.broadcast_to(old[:, None], total.shape), acc * own[:, None])
    return new, total_sum, total


@jit
def finish(row_sum, acc):
    """The output of rows [M, D], from their sums of weights and weighted values."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@jit
def oldest(start, WINDOW: tl.constexpr):
    """The oldest position that a request's first query token attends to."""
    oldest = start * 0
    if WINDOW >= 0:
        oldest = tl.maximum(start - WINDOW + 1, 0)
    return oldest


@jit
def _attend_block(
    q, k, v, first, seen, masked, start, token, qk_scale, row_max, row_sum, acc,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax after the block of positions from `first` on.

    Where `masked`, row i sees those up to `start` + `token` [M] that `seen` [M, N] allows.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    softmax_scale = qk_scale
    if SOFTCAP > 0.0:
        s = tanh_of(s, qk_scale)
        softmax_scale = SOFTCAP * 1.4426950408889634  # log2(e)
    if WINDOW >= 0 or masked:
        position = first + tl.arange(0, BLOCK_N)
        visible = seen & attends(token, position, start, token, 0, 0, WINDOW)
        s = tl.where(visible, s, float("-inf"))
    return online_softmax_step(s, v, softmax_scale, row_max, row_sum, acc)


@jit
def _attend_positions(
    q, page, first, token, start, full, low, high, table, k_ptr, v_ptr, qk_scale,
    row_max, row_sum, acc,
    ROW: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, INT64_OFFSETS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Page ids of the next block, and the softmax after the one of `page`, from `first` on.

    All rows see the positions before `full`, unless there is a window.
    """
    d = tl.arange(0, BLOCK_D)
    offset = kv_slots_of(page, first, low, high, PAGE_SIZE, BLOCK_N, INT64_OFFSETS) * ROW
    k = load_kv(k_ptr, offset, d, DIM, BLOCK_D, FP8).to(q.dtype)
    v = load_kv(v_ptr, offset, d, DIM, BLOCK_D, FP8).to(q.dtype)
    page = load_page_ids(table, first + BLOCK_N, low, high, PAGE_SIZE, BLOCK_N)
    seen = (first + tl.arange(0, BLOCK_N) < high)[None, :]
    row_max, row_sum, acc = _attend_block(
        q, k, v, first, seen, first + BLOCK_N > full, start, token, qk_scale,
        row_max, row_sum, acc, WINDOW, SOFTCAP, BLOCK_N,
    )  # fmt: skip
    return page, row_max, row_sum, acc


@jit
def _attend_blocks(
    q, begin, end, token, start, full, low, high, table, k_ptr, v_ptr, qk_scale,
    row_max, row_sum, acc,
    ROW: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, INT64_OFFSETS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax (row_max [M], row_sum [M], acc [M, D]) after positions [begin, end) of a segment."""
    page = load_page_ids(table, begin, low, high, PAGE_SIZE, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        page, row_max, row_sum, acc = _attend_positions(
            q, page, first, token, start, full, low, high, table, k_ptr, v_ptr, qk_scale,
            row_max, row_sum, acc, ROW, DIM, PAGE_SIZE, WINDOW, FP8, INT64_OFFSETS, BLOCK_N,
            BLOCK_D, SOFTCAP,
        )  # fmt: skip
    return row_max, row_sum, acc


@jit
def _attend_segments(
    q, segment, end_segment, token, start, full, low, high, table, k_ptr, v_ptr, qk_scale,
    head, sinks_ptr, out_ptr, stats_ptr, target, rows, inside,
    FOLDS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, FP8: tl.constexpr, INT64_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some segments of [low, high), the blocks of all in one loop, so that loads run ahead.

    FOLDS: they are the first ones, and it returns their fold, total_max and total_sum [M], total
    [M, D]; else each one's results are stored, at rows `target` [M] plus its number.
    """
    total_max, total_sum = begin_softmax(sinks_ptr, head, BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max, row_sum = begin_softmax(None, head, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = tl.maximum(segment_begin(segment), low // BLOCK_N * BLOCK_N)
    end = tl.minimum(segment_begin(end_segment), high)
    if WINDOW >= 0:  # a tile's rows may see nothing of the first ones
        if not FOLDS:
            for unseen in range(segment, tl.minimum(segment_of(low), end_segment)):
                own = target + unseen
                store_segment(out_ptr, stats_ptr, own, rows, inside, row_max, row_sum, acc, DIM)
        segment = tl.maximum(segment, segment_of(low))
    last = segment_begin(segment + 1)
    page = load_page_ids(table, begin, low, high, PAGE_SIZE, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        page, row_max, row_sum, acc = _attend_positions(
            q, page, first, token, start, full, low, high, table, k_ptr, v_ptr, qk_scale,
            row_max, row_sum, acc, ROW, DIM, PAGE_SIZE, WINDOW, FP8, INT64_OFFSETS, BLOCK_N,
            BLOCK_D, SOFTCAP,
        )  # fmt: skip
        ends = first + BLOCK_N >= tl.minimum(last, end)
        if ends:
            if FOLDS:
                total_max, total_sum, total = fold(
                    total_max, total_sum, total, row_max, row_sum, acc
                )  # fmt: skip
            else:
                own = target + segment
                store_segment(out_ptr, stats_ptr, own, rows, inside, row_max, row_sum, acc, DIM)
            segment += 1
            last = segment_begin(segment + 1)
            row_max, row_sum = begin_softmax(None, head, BLOCK_M)
        # Outside of the branch: else Triton does not wait for wgmma before it, and ptxas makes
        # every single one wait.
        acc = tl.where(ends, 0.0, acc)
    return total_max, total_sum, total


@jit
def store_segment(
    out_ptr, stats_ptr, target, rows, inside, row_max, row_sum, acc, DIM: tl.constexpr
):  # fmt: skip
    """Stores a segment's results of the rows that are `inside`, at row `target` + `rows` [M]."""
    d = tl.arange(0, acc.shape[1])
    mask = inside[:, None] & (d < DIM)[None, :]
    tl.store(out_ptr + target * DIM + (rows * DIM)[:, None] + d[None, :], acc, mask=mask)
    tl.store(stats_ptr + target * 2 + rows * 2, row_max, mask=inside)
    tl.store(stats_ptr + target * 2 + 1 + rows * 2, row_sum, mask=inside)


@jit
def load_segment(
    out_ptr, stats_ptr, source, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """What `store_segment` has stored at rows `source` [M] that are `inside`; of others, nothing.

    Returns row_max and row_sum [M], acc [M, D].
    """
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < DIM)[None, :]
    row_max = tl.load(stats_ptr + source * 2, mask=inside, other=-1e38)
    row_sum = tl.load(stats_ptr + source * 2 + 1, mask=inside, other=0.0)
    acc = tl.load(out_ptr + (source * DIM)[:, None] + d[None, :], mask=mask, other=0.0)
    return row_max, row_sum, acc


@jit
def slots_along_path(
    path, depth, start, first, table,
    PAGE_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """KV slots [N] of the positions from `first` on, as a node of a tree sees them.

    From `start` on these are its `depth` ancestors, which lead `path`, and itself; then it repeats.
    """
    step = first + tl.arange(0, BLOCK_N) - start
    ancestor = tl.load(path + tl.minimum(tl.maximum(step, 0), depth))
    stored = start + tl.where(step < 0, step, ancestor)
    page = tl.load(table + stored // PAGE_SIZE)
    if INT64_OFFSETS:
        page = page.to(tl.int64)
    return page * PAGE_SIZE + stored % PAGE_SIZE


@jit
def _attend_path(
    q, segment, row, token, node, depth, path, start, low, table, k_ptr, v_ptr, qk_scale,
    row_max, row_sum, acc,
    ROW: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, INT64_OFFSETS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The softmax after a segment's positions from the block of `start` on, along one node's path.

    For the rows of that node alone, `row` [M]; it has `depth` ancestors, which lead `path`.
    """
    d = tl.arange(0, BLOCK_D)
    begin = tl.maximum(segment_begin(segment), tl.maximum(low, start) // BLOCK_N * BLOCK_N)
    end = tl.minimum(segment_begin(segment + 1), start + depth + 1)
    for first in tl.range(begin, end, BLOCK_N, num_stages=1):
        slots = slots_along_path(
            path, depth, start, first, table, PAGE_SIZE, INT64_OFFSETS, BLOCK_N
        )
        offset = slots * ROW
        k = load_kv(k_ptr, offset, d, DIM, BLOCK_D, FP8).to(q.dtype)
        v = load_kv(v_ptr, offset, d, DIM, BLOCK_D, FP8).to(q.dtype)
        row_max, row_sum, acc = _attend_block(
            q, k, v, first, (row == node)[:, None], True, start, token, qk_scale,
            row_max, row_sum, acc, WINDOW, SOFTCAP, BLOCK_N,
        )  # fmt: skip
    return row_max, row_sum, acc


@jit
def _step_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, page_table, start_ptr, first_ptr, paths_ptr, depth_ptr,
    sinks_ptr, qk_scale, q_token_stride, q_head_stride, page_table_stride, num_segments,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, Q_LEN: tl.constexpr, PREFETCH_LEN: tl.constexpr,
    WHOLE: tl.constexpr, TREE: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, FP8: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One CTA per tile of a request's rows, K/V head, and share of its segments.

    A request has Q_LEN tokens, or with `first_ptr` at most so many, but Q_LEN nodes of a tree.
    The first CTA of a context folds its segments. WHOLE: these are all, and it stores the output
    [T, Hq, D]; else it stores their fold in the place of the first one's results, and other CTAs
    each segment's, [T, Hq, segments, D] and [T, Hq, segments, 2].
    """
    kv_head = tl.program_id(0) % KV_HEADS
    row_tile = tl.program_id(0) // KV_HEADS
    request = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.load(start_ptr + request)
    table = page_table + request.to(tl.int64) * page_table_stride
    place = request.to(tl.int64) * Q_LEN  # of the first token, or of the root among all nodes
    first_token, q_len = place, Q_LEN
    if first_ptr is not None:
        first_token, q_len = tokens_of(first_ptr, request)
    first_row = (row_tile * BLOCK_M) // GROUP  # token or node
    end_row = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, q_len)
    full = start + first_row + 1  # every row sees the positions before it, but for a window
    high = start + q_len
    if TREE:
        full = start + 1
        high = start // BLOCK_N * BLOCK_N  # of the blocks that all nodes share
    low = start * 0  # the oldest position that a row of the tile attends to
    if WINDOW >= 0:
        low = tl.minimum(tl.maximum(full - WINDOW, 0), start)

    ROW: tl.constexpr = KV_HEADS * DIM
    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    cta, ctas, last = tl.program_id(1), tl.num_programs(1), start + q_len - 1
    folds = True if WHOLE else cta == 0
    first_segment = share_begin(cta, ctas, start, last, WINDOW)
    end_segment = share_begin(cta + 1, ctas, start, last, WINDOW)
    if first_ptr is not None:
        end_segment = tl.where(first_row < q_len, end_segment, 0)
    if PDL:
        if first_segment < end_segment:
            first = tl.maximum(segment_begin(first_segment), low)
            prefetch_kv(
                k_ptr, v_ptr, table, first, start + q_len,
                PAGE_SIZE, INT64_OFFSETS, ROW, DIM, BLOCK_D, PREFETCH_LEN,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()

    m, d = row_tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = m // GROUP
    at = first_token + row
    head = kv_head * GROUP + m % GROUP
    inside = m < GROUP * q_len
    q_mask = inside[:, None] & (d < DIM)[None, :]
    q_ptr += (at * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
    q_type: tl.constexpr = q_ptr.dtype.element_ty
    # float8 converts to float16 in one instruction, to bfloat16 in several.
    dtype: tl.constexpr = tl.float16 if FP8 > 0 and q_type.primitive_bitwidth == 16 else q_type
    q = cast_q(tl.load(q_ptr, mask=q_mask, other=0), dtype)
    out_row = at * (KV_HEADS * GROUP) + head
    token = row
    if TREE:
        token = tl.load(depth_ptr + place + row, mask=inside, other=0)

    HEADS: tl.constexpr = KV_HEADS * GROUP
    target = ((first_token + first_row) * HEADS + kv_head * GROUP) * num_segments
    rows = ((row - first_row) * HEADS + m % GROUP) * num_segments
    if TREE:
        total_max, total_sum = begin_softmax(sinks_ptr, head, BLOCK_M)
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for segment in range(first_segment, end_segment):
            row_max, row_sum = begin_softmax(None, head, BLOCK_M)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            row_max, row_sum, acc = _attend_blocks(
                q, tl.maximum(segment_begin(segment), low // BLOCK_N * BLOCK_N),
                tl.minimum(segment_begin(segment + 1), high), token, start, full, low, high,
                table, k_ptr, v_ptr, qk_scale, row_max, row_sum, acc, ROW, DIM, PAGE_SIZE, WINDOW,
                FP8, INT64_OFFSETS, BLOCK_N, BLOCK_D, SOFTCAP, STAGES,
            )  # fmt: skip
            for node in range(first_row, end_row):
                of_node = place + node
                depth = tl.load(depth_ptr + of_node)
                row_max, row_sum, acc = _attend_path(
                    q, segment, row, token, node, depth, paths_ptr + of_node * Q_LEN, start, low,
                    table, k_ptr, v_ptr, qk_scale, row_max, row_sum, acc,
                    ROW, DIM, PAGE_SIZE, WINDOW, FP8, INT64_OFFSETS, BLOCK_N, BLOCK_D, SOFTCAP,
                )  # fmt: skip
            if folds:
                total_max, total_sum, total = fold(
                    total_max, total_sum, total, row_max, row_sum, acc
                )  # fmt: skip
            else:
                own = target + segment
                store_segment(out_ptr, stats_ptr, own, rows, inside, row_max, row_sum, acc, DIM)
    elif folds:
        total_max, total_sum, total = _attend_segments(
            q, first_segment, end_segment, token, start, full, low, high, table, k_ptr,
            v_ptr, qk_scale, head, sinks_ptr, out_ptr, stats_ptr, target, rows, inside, True, ROW,
            DIM, PAGE_SIZE, WINDOW, FP8, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP, STAGES,
        )  # fmt: skip
    else:
        total_max, total_sum, total = _attend_segments(
            q, first_segment, end_segment, token, start, full, low, high, table, k_ptr,
            v_ptr, qk_scale, head, sinks_ptr, out_ptr, stats_ptr, target, rows, inside, False, ROW,
            DIM, PAGE_SIZE, WINDOW, FP8, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP, STAGES,
        )  # fmt: skip
    if WHOLE:
        out = finish(total_sum, total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (out_row * DIM)[:, None] + d[None, :], out, mask=q_mask)
    elif folds:
        own = target + first_segment
        store_segment(out_ptr, stats_ptr, own, rows, inside, total_max, total_sum, total, DIM)


@jit
def _fold_kernel(
    partial_ptr, stats_ptr, out_ptr, start_ptr, first_ptr, places, rows, num_segments, ctas,
    NUM_HEADS: tl.constexpr, Q_LEN: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One CTA per BLOCK_ROWS of T * Hq: folds what `ctas` of `_step_kernel` have stored.

    Token t is one of request t // Q_LEN; with `places`, of places[t] // Q_LEN.
    AHEAD of them are loaded at once: those past the last one weigh nothing.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = row < rows
    mask = inside[:, None] & (d < DIM)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = row // NUM_HEADS
    request, q_len = token // Q_LEN, Q_LEN
    if places is not None:
        request = tl.load(places + token, mask=inside, other=0) // Q_LEN
        begin = tl.load(first_ptr + request, mask=inside, other=0)
        q_len = tl.load(first_ptr + request + 1, mask=inside, other=1) - begin
    start = tl.load(start_ptr + request, mask=inside, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    last = start + q_len - 1
    prefix = row * num_segments + share_begin(0, ctas, start, last, WINDOW)
    first = share_begin(1, ctas, start, last, WINDOW)
    end = share_begin(ctas, ctas, start, last, WINDOW)
    total_max, total_sum, total = load_segment(
        partial_ptr, stats_ptr, prefix, inside, DIM, BLOCK_D
    )  # fmt: skip
    for least in range(tl.min(tl.where(inside, first, 1 << 30), 0), tl.max(end, 0), AHEAD):
        for i in tl.static_range(AHEAD):
            segment = least + i
            stored = inside & (segment >= first) & (segment < end)
            row_max, row_sum, acc = load_segment(
                partial_ptr, stats_ptr, row * num_segments + segment, stored, DIM, BLOCK_D
            )  # fmt: skip
            total_max, total_sum, total = fold(
                total_max, total_sum, total, row_max, row_sum, acc
            )  # fmt: skip
    out = finish(total_sum, total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * DIM)[:, None] + d[None, :], out, mask=mask)


@jit
def _chunk_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, page_table, start_ptr, tile_map, sinks_ptr, qk_scale,
    q_token_stride, q_head_stride, page_table_stride,
    MAP_TOKENS: tl.constexpr, TILE_TOKENS: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, INT64_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One CTA per K/V head, entry of the tile map, and TILE_TOKENS of its MAP_TOKENS."""
    kv_head = tl.program_id(0) % KV_HEADS
    entry = tile_map + tl.program_id(1) * 4
    request = tl.load(entry)
    begin, count = tl.load(entry + 1), tl.load(entry + 2)
    map_token = tl.load(entry + 3)
    first_token = map_token + tl.program_id(0) // KV_HEADS * TILE_TOKENS
    count = tl.minimum(count, map_token + MAP_TOKENS)  # past it, another entry's
    start = tl.load(start_ptr + request)
    table = page_table + request.to(tl.int64) * page_table_stride

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = first_token + m // GROUP
    inside = (m < TILE_TOKENS * GROUP) & (row < count)
    q_mask = inside[:, None] & (d < DIM)[None, :]
    token = (begin + row).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    q_ptr += (token * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
    q_type: tl.constexpr = q_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float16 if FP8 > 0 and q_type.primitive_bitwidth == 16 else q_type
    q = cast_q(tl.load(q_ptr, mask=q_mask, other=0), dtype)

    high = start + tl.minimum(first_token + TILE_TOKENS, count)
    if first_token >= count:
        return
    full, low = start + first_token + 1, start * 0
    if WINDOW >= 0:
        low = tl.maximum(full - WINDOW, 0)
    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    _, total_sum, total = _attend_segments(
        q, segment_of(low), segment_of(high - 1) + 1, row, start, full, low, high, table, k_ptr,
        v_ptr, qk_scale, head, sinks_ptr, None, None, head, head, inside, True, KV_HEADS * DIM, DIM,
        PAGE_SIZE, WINDOW, FP8, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP, STAGES,
    )  # fmt: skip
    out = finish(total_sum, total).to(out_ptr.dtype.element_ty)
    target = ((token * (KV_HEADS * GROUP) + head) * DIM)[:, None] + d[None, :]
    tl.store(out_ptr + target, out, mask=q_mask)
