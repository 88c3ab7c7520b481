# mypy: allow-untyped-defs, allow-incomplete-defs
"""Paged attention for prompt chunks: many rows a request, as many as each has.

The rows are cut into tiles on the host, which knows their counts exactly; a program takes one
tile of one K/V head: BLOCK_M / group rows with all query heads that share the head, so that the
triangle a causal mask wastes stays thin. Requests run one after the other, so that their K/V stays
in the L2 cache; the longest comes first, and of each its last tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention.decode import (
    CAUSAL,
    LOG2E,
    MaskSpec,
    paged_attention_ref,
    wide_offsets,
)
from forerun.kernels.attention.decode_kernels import (
    as_kind,
    load_kv,
    page_ids,
    pool_rows_of,
    soft_step,
    visible,
)
from forerun.kernels.attention.tiles import Tiles, prefill_tiles
from forerun.kernels.runtime.fp8 import as_bits, fp8_mode
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton


@dataclass(frozen=True)
class TileMap:
    """Which rows each program takes.

    `entries` [tiles, 4] int32: request, its first row in the batch, its rows, the tile's first
    row among them.
    """

    entries: Tensor
    rows: int  # rows a tile holds


def map_tiles(
    spans: Sequence[tuple[int, int]], rows: int, upload: Callable[[Tensor], Tensor]
) -> TileMap:
    """`spans`: (start, rows) of each request, on the host. `upload`: host tensor to device."""
    start, count = torch.tensor(spans, dtype=torch.int64).view(-1, 2).unbind(1)
    begin = count.cumsum(0) - count
    order = (start + count).argsort(descending=True, stable=True)
    tiles = ((count + rows - 1) // rows)[order]
    request = order.repeat_interleave(tiles)
    first = tiles.cumsum(0).repeat_interleave(tiles) - 1 - torch.arange(request.shape[0])
    entries = torch.stack((request, begin[request], count[request], first * rows), 1)
    return TileMap(upload(entries.int()), rows)


def prefill_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start: Tensor,
    spans: Sequence[tuple[int, int]],
    tile_map: TileMap | None,
    mask_spec: MaskSpec,
    scale: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention of ragged rows; their K/V is in the pool already.

    Args:
        q: [T, Hq, D]; tokens may be apart in memory.
        k_pool, v_pool: [pages, P, Hkv, D], any float dtype or float8_e4m3fn.
        page_table: [B, pages] int32.
        start: [B] int32, position of each request's first row.
        spans: host (start, rows) of each request.
        tile_map: from `map_tiles` with `tiles.block_m // group` rows; the twin needs none.
        mask_spec: causal, or the whole chunk as one block.
        scale: of the scores.
        tiles: instead of the tuned ones.

    Returns:
        [T, Hq, D] in q's dtype.
    """
    if not use_triton(q) or tile_map is None:
        return prefill_attention_ref(q, k_pool, v_pool, page_table, start, spans, mask_spec, scale)
    total, heads, dim = q.shape
    kv_heads = k_pool.shape[2]
    if tiles is None:
        tiles = prefill_tiles(gpu_of(q.device), dim, q.dtype)
    assert tile_map.rows * heads <= tiles.block_m * kv_heads, "a tile has no room for its heads"
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    _prefill[(kv_heads, tile_map.entries.shape[0])](
        q,
        as_bits(k_pool),
        as_bits(v_pool),
        out,
        page_table,
        start,
        tile_map.entries,
        scale * LOG2E,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        ROWS=tile_map.rows,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=k_pool.shape[1],
        MASK=mask_spec.mask,
        WINDOW=-1 if mask_spec.window is None else mask_spec.window,
        FP8=fp8_mode(k_pool),
        WIDE=wide_offsets(k_pool),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **tiles.limits(),
    )
    return out


@jit
def _prefill(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, start_ptr, map_ptr, qk_scale,
    q_token, q_head, table_row,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, FP8: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    entry = map_ptr + tl.program_id(1) * 4
    request = tl.load(entry)
    begin, count, first_row = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    start = tl.load(start_ptr + request)
    table = table_ptr + request.to(tl.int64) * table_row

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = first_row + m // GROUP
    inner = (m < ROWS * GROUP) & (row < count)
    real = inner[:, None] & (d < DIM)[None, :]
    token = (begin + row).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + d[None, :], mask=real, other=0)
    q_type: tl.constexpr = q_ptr.dtype.element_ty
    kind: tl.constexpr = tl.float16 if FP8 > 0 and q_type.primitive_bitwidth == 16 else q_type
    q = as_kind(q, kind)

    # Blocks within [clear, full) are seen by every row.
    last_row = tl.minimum(first_row + ROWS, count) - 1
    low, high = start * 0, start + count
    clear, full = low, high
    if MASK == 0:
        full, high = start + first_row + 1, start + last_row + 1
        if WINDOW >= 0:
            low = tl.maximum(start + first_row - WINDOW + 1, 0)
            clear = tl.maximum(start + last_row - WINDOW + 1, 0)
    elif WINDOW >= 0:
        low = tl.maximum(start - WINDOW, 0)
        clear = low

    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    top = tl.full([BLOCK_M], -1e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    base = low // BLOCK_N * BLOCK_N
    page = page_ids(table, base, low, high, PAGE, BLOCK_N)
    for first in range(base, high, BLOCK_N):
        offset = pool_rows_of(page, first, low, high, PAGE, BLOCK_N, WIDE) * (KV_HEADS * DIM)
        k = load_kv(k_ptr, offset, d, DIM, BLOCK_D, FP8).to(kind)
        v = load_kv(v_ptr, offset, d, DIM, BLOCK_D, FP8).to(kind)
        page = page_ids(table, first + BLOCK_N, low, high, PAGE, BLOCK_N)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if (first + BLOCK_N > full) | (first < clear):
            position = first + tl.arange(0, BLOCK_N)
            seen = visible(row, position, start, row, count, MASK, WINDOW)
            s = tl.where(seen, s, float("-inf"))
        top, total, acc = soft_step(s, v, qk_scale, top, total, acc)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = ((token * (KV_HEADS * GROUP) + head) * DIM)[:, None] + d[None, :]
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=real)


def prefill_attention_ref(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start: Tensor,
    spans: Sequence[tuple[int, int]],
    mask_spec: MaskSpec,
    scale: float,
) -> Tensor:
    """Twin of `prefill_attention`: one request after the other."""
    assert mask_spec.mask in (CAUSAL, 1)
    parts, first = [], 0
    for i, (begin, count) in enumerate(spans):
        used = -(-(begin + count) // k_pool.shape[1])
        parts.append(
            paged_attention_ref(
                q[first : first + count],
                k_pool,
                v_pool,
                page_table[i : i + 1, :used],
                start[i : i + 1],
                count,
                mask_spec,
                scale,
            )
        )
        first += count
    return torch.cat(parts)
