"""Paged attention for short query blocks: decoding, verification, a draft's block.

Every request has the same few rows W. The W rows and the query heads that share a K/V head are
packed into tiles of M = W * group rows, so that K/V is read once for all of them, and the
context is cut into splits that run side by side (flash-decoding); a second kernel puts the
partial results together. How many splits there are is fixed on the host; which positions each
of them covers follows from the lengths on the device, so a graph captured for the longest
context costs little at a short one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.attention.decode_kernels import combine, short_block
from forerun.kernels.attention.tiles import Tiles, decode_tiles, uses_tma
from forerun.kernels.runtime.fp8 import as_bits, fp8_mode
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

CAUSAL, BLOCK, TREE = 0, 1, 2  # as kernels see masks
LOG2E = math.log2(math.e)
AHEAD = 128  # positions a program brings into the L2 cache while it waits
COMBINED = 4096  # elements of partial results that a program puts together at once


@dataclass(frozen=True)
class MaskSpec:
    """What a query row sees of its request's positions; `start` is that of the first row.

    CAUSAL: a row at p sees (p - window, p]. BLOCK: the last `window` positions before `start`
    and all rows of the block. TREE: all before `start`, and the block's rows whose bits are set.
    """

    mask: int = CAUSAL
    window: int | None = None


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start: Tensor,
    width: int,
    mask_spec: MaskSpec,
    scale: float,
    splits: int,
    tree: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention of W rows for each of B requests; their K/V is in the pool already.

    Under programmatic dependent launch `start`, `page_table` and the K/V of positions before
    `start` are read before the kernel waits for its predecessor: a kernel without it (`pool_rows`)
    must lie between what writes them and this one. The W rows' own K/V is read after the wait.

    Fastest on Hopper and later where a page holds whole blocks (64 positions; 32 of head dim 256).

    Args:
        q: [B * W, Hq, D]; tokens may be apart in memory.
        k_pool, v_pool: [pages, P, Hkv, D], any float dtype or float8_e4m3fn.
        page_table: [B, pages] int32.
        start: [B] int32, position of each request's first row.
        width: W.
        mask_spec: the mask.
        scale: of the scores.
        splits: parts the context is cut into, from `choose_splits`.
        tree: [B * W] int64 for TREE: bit j of a row: it sees row j of its block (W <= 64).
        tiles: instead of the tuned ones.

    Returns:
        [B * W, Hq, D] in q's dtype.
    """
    if not use_triton(q):
        return paged_attention_ref(
            q, k_pool, v_pool, page_table, start, width, mask_spec, scale, tree
        )
    total, heads, dim = q.shape
    page, kv_heads = k_pool.shape[1:3]
    group = heads // kv_heads
    if tiles is None:
        gpu, rows = gpu_of(q.device), group * width
        alone = -(-rows // 64) * kv_heads * splits * start.shape[0] <= gpu.num_sms
        tiles = decode_tiles(gpu, rows, dim, q.dtype, k_pool.dtype, page, alone)
    count = triton.cdiv(group * width, tiles.block_m)
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    part, lse = out, out
    if splits > 1:
        part = torch.empty((total, heads, splits, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((total, heads, splits), dtype=torch.float32, device=q.device)
    bulk = uses_tma(gpu_of(q.device), page, tiles.block_n, dim, k_pool.dtype)
    short_block[(kv_heads * count, splits, start.shape[0])](
        q,
        as_bits(k_pool),
        as_bits(v_pool),
        _blocks(k_pool, tiles) if bulk else None,
        _blocks(v_pool, tiles) if bulk else None,
        part,
        lse,
        page_table,
        start,
        q if tree is None else tree,
        scale * LOG2E,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        GROUP=group,
        KV_HEADS=kv_heads,
        WIDTH=width,
        DIM=dim,
        PAGE=page,
        MASK=mask_spec.mask,
        WINDOW=-1 if mask_spec.window is None else mask_spec.window,
        SPLIT=splits > 1,
        FP8=fp8_mode(k_pool),
        WIDE=wide_offsets(k_pool),
        BULK=bulk,
        AHEAD=AHEAD,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=triton.next_power_of_2(dim),
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(q),
    )
    if splits > 1:
        _combine(part, lse, out)
    return out


def wide_offsets(pool: Tensor) -> bool:
    """Whether an element's place in a pool needs more than 32 bits."""
    return pool.numel() >= 1 << 31


def _blocks(pool: Tensor, tiles: Tiles) -> Any:
    """Descriptor of a pool's blocks, [1, N, D] of [pages, P, Hkv * D]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [1, tiles.block_n, pool.shape[3]]
    return TensorDescriptor.from_tensor(pool.flatten(2), block)


def _combine(part: Tensor, lse: Tensor, out: Tensor) -> None:
    """part [T, Hq, S, D], lse [T, Hq, S] float32 -> out [T, Hq, D]."""
    total, heads, splits, dim = part.shape
    rows, power = total * heads, triton.next_power_of_2(splits)
    most = max(1, COMBINED // (power * triton.next_power_of_2(dim)))
    fill = triton.next_power_of_2(triton.cdiv(rows, 2 * gpu_of(out.device).num_sms))
    each = min(most, fill)
    combine[(triton.cdiv(rows, each),)](
        part,
        lse,
        out,
        rows,
        splits,
        DIM=dim,
        ROWS=each,
        SPLITS=power,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
        **pdl_options(out),
    )


# --- the twin ---------------------------------------------------------------------------------


def paged_attention_ref(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start: Tensor,
    width: int,
    mask_spec: MaskSpec,
    scale: float,
    tree: Tensor | None = None,
) -> Tensor:
    """Twin of `paged_attention`: gathers every page of the table; at least float32 inside."""
    total, heads, dim = q.shape
    batch, kv_heads = start.shape[0], k_pool.shape[2]
    exact = torch.promote_types(q.dtype, torch.float32)
    tile = q.view(batch, width, kv_heads, heads // kv_heads, dim).to(exact)
    k, v = (
        pool[page_table.long()].to(exact).flatten(1, 2)  # [B, L, Hkv, D]
        for pool in (k_pool, v_pool)
    )
    seen = _visible_ref(start, width, k.shape[1], mask_spec, tree)  # [B, W, L]
    reached = seen.any(1)[:, :, None, None]
    k, v = k.where(reached, 0.0), v.where(reached, 0.0)
    scores = torch.einsum("bwhgd,blhd->bhgwl", tile, k) * scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    out = torch.einsum("bhgwl,blhd->bwhgd", scores.softmax(-1), v)
    return out.reshape(total, heads, dim).to(q.dtype)


def _visible_ref(
    start: Tensor, width: int, length: int, mask_spec: MaskSpec, tree: Tensor | None
) -> Tensor:
    """[B, W, L] bool."""
    position = torch.arange(length, device=start.device).view(1, 1, -1)
    begin = start.long().view(-1, 1, 1)
    last = begin + torch.arange(width, device=start.device).view(1, -1, 1)
    if mask_spec.mask == TREE:
        assert tree is not None
        behind = position - begin
        bits = tree.view(-1, width, 1) >> behind.clamp(0, 63)
        return (behind < 0) | ((bits & 1).bool() & (behind < width))
    oldest = begin if mask_spec.mask == BLOCK else last + 1
    seen = position < begin + width if mask_spec.mask == BLOCK else position <= last
    if mask_spec.window is not None:
        seen = seen & (position >= oldest - mask_spec.window)
    return seen.expand(-1, width, -1)
