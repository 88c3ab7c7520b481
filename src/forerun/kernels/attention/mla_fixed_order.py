# mypy: allow-untyped-defs, allow-incomplete-defs
"""MLA with absorbed projections in a fixed order: `fixed_order.py` over latent rows.

Every token attends in the absorbed form, of a prompt too: the expanded form rounds otherwise.
Segments, their folding and the way through trees are those of `fixed_order.py`. A block of rows is
loaded once, whole as K and its latent part as V (`mla_absorbed.py`). The accumulators of a segment
and those of all before it are in registers, 512 values of each row: so a tile has fewer rows than
where segments are not folded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention.decode import TREE, MaskSpec, needs_int64_offsets
from forerun.kernels.attention.decode_kernels import (
    attends,
    begin_softmax,
    cast_q,
    kv_slots_of,
    load_kv,
    load_page_ids,
    online_softmax_step,
    tokens_of,
)
from forerun.kernels.attention.fixed_order import (
    StepTokens,
    TreePaths,
    choose_ctas,
    finish,
    fold,
    fold_segments,
    num_segments,
    segment_begin,
    share_begin,
    slots_along_path,
    store_segment,
)
from forerun.kernels.attention.mla_absorbed import PagedLatent
from forerun.kernels.attention.tile_map import TileMap
from forerun.kernels.attention.tiles import mla_fixed_order_tile, padded
from forerun.kernels.runtime.fp8 import as_bits, fp8_mode
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl, triton
from forerun.kernels.runtime.pdl import pdl_options


def mla_fixed_order_decode(
    q: Tensor,
    cache: PagedLatent,
    q_len: int,
    mask: MaskSpec,
    scale: float,
    kv_len_ub: int,
    paths: TreePaths | None = None,
) -> Tensor:
    """`mla_decode` in a fixed order.

    Args:
        q: [T, Hq, Dl + Dr], with W_UK absorbed; tokens and heads at any stride. T = B * q_len
            without `cache.rows`.
        cache: the latent pool; the tokens' rows are in it already.
        q_len: tokens per request, or at most.
        mask: causal, or a tree.
        scale: of the scores.
        kv_len_ub: the longest context, query tokens included, that a request may have.
        paths: of a tree, all of its B * q_len nodes.

    Returns:
        [T, Hq, Dl] in q's dtype.
    """
    assert (mask.mask == TREE) == (paths is not None)
    (total, heads, _), dim, batch = q.shape, cache.latent_dim, cache.start.shape[0]
    tile = mla_fixed_order_tile(gpu_of(q.device), cache.shape(q.dtype))
    row_tiles = triton.cdiv(heads * q_len, tile.block_m)
    # A tile takes the room of two.
    ctas = choose_ctas(gpu_of(q.device), 2 * batch * row_tiles, kv_len_ub, per_sm=4)
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    launch, grid = _Launch(cache, mask, scale, paths), (row_tiles, ctas, batch)
    if ctas == 1:
        launch(grid, q, out, q_len=q_len)
        return out
    shape = (total, heads, num_segments(kv_len_ub))
    partial = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    launch(grid, q, partial, stats, q_len)
    fold_segments(partial, stats, out, StepTokens(cache.start, q_len, cache.rows), mask, ctas)
    return out


def mla_fixed_order_prefill(
    q: Tensor, cache: PagedLatent, tile_map: TileMap, mask: MaskSpec, scale: float
) -> Tensor:
    """`mla_prefill` in a fixed order.

    Args:
        q: [T, Hq, Dl + Dr], with W_UK absorbed; tokens and heads at any stride.
        cache: the latent pool.
        tile_map: from `build_row_tile_map` with the rows of `mla_fixed_order_tile`.
        mask: causal.
        scale: of the scores.

    Returns:
        [T, Hq, Dl] in q's dtype.
    """
    out = torch.empty((*q.shape[:2], cache.latent_dim), dtype=q.dtype, device=q.device)
    launch = _Launch(cache, mask, scale)
    launch((len(tile_map.entries), 1, 1), q, out, tile_map=tile_map.entries)
    return out


@dataclass(frozen=True)
class _Launch:
    """What steps and chunks launch alike."""

    cache: PagedLatent
    mask: MaskSpec
    scale: float
    paths: TreePaths | None = None

    def __call__(
        self,
        grid: tuple[int, int, int],
        q: Tensor,
        out: Tensor,
        stats: Tensor | None = None,
        q_len: int = 0,
        tile_map: Tensor | None = None,
    ) -> None:
        """`out`: the result, or with `stats` those of segments; `q_len` 0: ragged chunks."""
        cache, mask, paths = self.cache, self.mask, self.paths
        tile = mla_fixed_order_tile(gpu_of(q.device), cache.shape(q.dtype))
        latent, rope = cache.latent_dim, cache.rope_dim
        _latent_kernel[grid](
            q, as_bits(cache.pool), out, out if stats is None else stats,
            cache.page_table, cache.start, None if cache.rows is None else cache.rows.first,
            cache.start if tile_map is None else tile_map,
            q if paths is None else paths.nodes, q if paths is None else paths.depth,
            mask.qk_scale(self.scale), q.stride(0), q.stride(1), cache.page_table.stride(0),
            0 if stats is None else stats.shape[2],
            HEADS=q.shape[1], Q_LEN=q_len, LATENT=latent, ROPE=rope, WHOLE=stats is None,
            TREE=paths is not None, PAGE_SIZE=cache.page_size, WINDOW=mask.window_constant,
            FP8=fp8_mode(cache.pool), INT64_OFFSETS=needs_int64_offsets(cache.pool),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_L=padded(latent),
            BLOCK_R=padded(rope), STAGES=tile.num_stages,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
            **(pdl_options(q) if tile_map is None else {"PDL": False}),
        )  # fmt: skip


@jit
def _attend_rows(
    q_latent, q_rope, pool, offset, first, seen, start, token, qk_scale, row_max, row_sum, acc,
    LATENT: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr, FP8: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The softmax after the rows at `offset` [N], of the positions from `first` on.

    A tile's row sees those up to `start` + `token` [M] that `seen` [M, N] allows. There is no
    branch for blocks that all rows see: Triton would lay out the scores, and add up their weights,
    otherwise in a loop with a branch than in one without.
    """
    d, r = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    latent = load_kv(pool, offset, d, LATENT, BLOCK_L, FP8).to(q_latent.dtype)
    rope = load_kv(pool + LATENT, offset, r, ROPE, BLOCK_R, FP8).to(q_latent.dtype)
    s = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
    s = tl.dot(q_latent, tl.trans(latent), s, input_precision="ieee")
    position = first + tl.arange(0, BLOCK_N)
    visible = seen & attends(token, position, start, token, 0, 0, WINDOW)
    s = tl.where(visible, s, float("-inf"))
    return online_softmax_step(s, latent, qk_scale, row_max, row_sum, acc)


@jit
def _latent_kernel(
    q_ptr, pool, out_ptr, stats_ptr, page_table, start_ptr, first_ptr, tile_map, paths_ptr,
    depth_ptr,
    qk_scale, q_token_stride, q_head_stride, page_table_stride, num_segments,
    HEADS: tl.constexpr, Q_LEN: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    WHOLE: tl.constexpr, TREE: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, INT64_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One CTA per tile of a request's rows (tokens times heads), and share of its segments.

    Q_LEN > 0: every request has that many tokens, or with `first_ptr` at most; the grid is (tiles,
    CTAs per context, requests).
    Q_LEN = 0: ragged chunks; the grid is (tiles,), each with an entry of the tile map, in rows.
    The first CTA of a context folds its segments, and WHOLE: `_step_kernel` of `fixed_order.py`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if Q_LEN > 0:
        request = tl.program_id(2)
        first_row = tl.program_id(0) * BLOCK_M
        place = request.to(tl.int64) * Q_LEN  # of the first token, or of the root among all nodes
        first_token, q_len = place, Q_LEN
        if first_ptr is not None:
            first_token, q_len = tokens_of(first_ptr, request)
    else:
        entry = tile_map + tl.program_id(0) * 4
        request = tl.load(entry)
        first_row = tl.load(entry + 3)
        q_len = tl.load(entry + 2) // HEADS
        first_token = (tl.load(entry + 1) // HEADS).to(tl.int64)
        place = first_token
    start = tl.load(start_ptr + request)
    table = page_table + request.to(tl.int64) * page_table_stride
    first_node = first_row // HEADS
    end_node = tl.minimum((first_row + BLOCK_M - 1) // HEADS + 1, q_len)
    high = start + end_node
    last = start + q_len - 1 if Q_LEN > 0 else high - 1  # that the folding kernel counts on
    if TREE:
        high = start // BLOCK_N * BLOCK_N  # of the blocks that all nodes share
    low = start * 0  # the oldest position that a row of the tile attends to
    if WINDOW >= 0:
        first_query = start if TREE else start + first_node
        low = tl.minimum(tl.maximum(first_query + 1 - WINDOW, 0), start)

    m, d, r = first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    row, head, inside = m // HEADS, m % HEADS, m < HEADS * q_len
    at = first_token + row
    q_ptr += (at * q_token_stride + head * q_head_stride)[:, None]
    q_type: tl.constexpr = q_ptr.dtype.element_ty
    # float8 converts to float16 in one instruction, to bfloat16 in several.
    dtype: tl.constexpr = tl.float16 if FP8 > 0 and q_type.primitive_bitwidth == 16 else q_type
    l_mask = inside[:, None] & (d < LATENT)[None, :]
    q_latent = tl.load(q_ptr + d[None, :], mask=l_mask, other=0)
    r_mask = inside[:, None] & (r < ROPE)[None, :]
    q_rope = tl.load(q_ptr + LATENT + r[None, :], mask=r_mask, other=0)
    q_latent, q_rope = cast_q(q_latent, dtype), cast_q(q_rope, dtype)
    out_row = at * HEADS + head
    token = row
    if TREE:
        token = tl.load(depth_ptr + place + row, mask=inside, other=0)

    ROW: tl.constexpr = LATENT + ROPE
    target = (first_token * HEADS + first_row) * num_segments
    rows = (m - first_row) * num_segments
    total_max, total_sum = begin_softmax(None, head, BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    cta, ctas = tl.program_id(1), tl.num_programs(1)
    folds = True if WHOLE else cta == 0
    first_segment = share_begin(cta, ctas, start, last, WINDOW)
    end_segment = share_begin(cta + 1, ctas, start, last, WINDOW)
    if first_ptr is not None:
        end_segment = tl.where(first_node < q_len, end_segment, 0)
    for segment in range(first_segment, end_segment):
        row_max, row_sum = begin_softmax(None, head, BLOCK_M)
        acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
        begin = tl.maximum(segment_begin(segment), low // BLOCK_N * BLOCK_N)
        end = tl.minimum(segment_begin(segment + 1), high)
        page = load_page_ids(table, begin, low, high, PAGE_SIZE, BLOCK_N)
        for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            offset = kv_slots_of(page, first, low, high, PAGE_SIZE, BLOCK_N, INT64_OFFSETS) * ROW
            page = load_page_ids(table, first + BLOCK_N, low, high, PAGE_SIZE, BLOCK_N)
            seen = (first + tl.arange(0, BLOCK_N) < high)[None, :]
            row_max, row_sum, acc = _attend_rows(
                q_latent, q_rope, pool, offset, first, seen, start, token, qk_scale,
                row_max, row_sum, acc,
                LATENT, ROPE, WINDOW, FP8, BLOCK_N, BLOCK_L, BLOCK_R,
            )  # fmt: skip
        if TREE:
            # The blocks from that of `start` on, along the path of each node, for its rows alone.
            begin = tl.maximum(segment_begin(segment), tl.maximum(low, start) // BLOCK_N * BLOCK_N)
            for node in range(first_node, end_node):
                depth = tl.load(depth_ptr + place + node)
                path = paths_ptr + (place + node) * Q_LEN
                end = tl.minimum(segment_begin(segment + 1), start + depth + 1)
                for first in tl.range(begin, end, BLOCK_N, num_stages=1):
                    slots = slots_along_path(
                        path, depth, start, first, table, PAGE_SIZE, INT64_OFFSETS, BLOCK_N
                    )  # fmt: skip
                    row_max, row_sum, acc = _attend_rows(
                        q_latent, q_rope, pool, slots * ROW, first, (row == node)[:, None],
                        start, token, qk_scale, row_max, row_sum, acc,
                        LATENT, ROPE, WINDOW, FP8, BLOCK_N, BLOCK_L, BLOCK_R,
                    )  # fmt: skip
        if folds:
            total_max, total_sum, total = fold(total_max, total_sum, total, row_max, row_sum, acc)
        else:
            own = target + segment
            store_segment(out_ptr, stats_ptr, own, rows, inside, row_max, row_sum, acc, LATENT)
    if WHOLE:
        out = finish(total_sum, total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (out_row * LATENT)[:, None] + d[None, :], out, mask=l_mask)
    elif folds:
        own = target + first_segment
        store_segment(out_ptr, stats_ptr, own, rows, inside, total_max, total_sum, total, LATENT)
