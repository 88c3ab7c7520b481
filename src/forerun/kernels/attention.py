# mypy: allow-untyped-defs, allow-incomplete-defs
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

import torch
from torch import Tensor

from forerun.kernels.attention_tiles import Tiles, short_tiles
from forerun.kernels.device import gpu_of
from forerun.kernels.dispatch import jit, tl, triton, use_triton
from forerun.kernels.fp8 import as_bits, decode_e4m3, fp8_mode
from forerun.kernels.pdl import pdl_options

CAUSAL, BLOCK, TREE = 0, 1, 2  # as kernels see masks
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Sight:
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
    sight: Sight,
    scale: float,
    splits: int,
    tree: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention of W rows for each of B requests; their K/V is in the pool already.

    Under programmatic dependent launch `start` and `page_table` are read before the kernel waits
    for its predecessor: a kernel without it (`pool_rows`) must lie between what writes them and
    this one.

    Args:
        q: [B * W, Hq, D]; tokens may be apart in memory.
        k_pool, v_pool: [pages, P, Hkv, D], any float dtype or float8_e4m3fn.
        page_table: [B, pages] int32.
        start: [B] int32, position of each request's first row.
        width: W.
        sight: the mask.
        scale: of the scores.
        splits: parts the context is cut into, from `choose_splits`.
        tree: [B * W] int64 for TREE: bit j of a row: it sees row j of its block (W <= 64).
        tiles: instead of the tuned ones.

    Returns:
        [B * W, Hq, D] in q's dtype.
    """
    if not use_triton(q):
        return paged_attention_torch(
            q, k_pool, v_pool, page_table, start, width, sight, scale, tree
        )
    total, heads, dim = q.shape
    kv_heads = k_pool.shape[2]
    group = heads // kv_heads
    if tiles is None:
        tiles = short_tiles(gpu_of(q.device), group * width, dim, q.dtype)
    count = triton.cdiv(group * width, tiles.block_m)
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    part, lse = out, out
    if splits > 1:
        part = torch.empty((total, heads, splits, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((total, heads, splits), dtype=torch.float32, device=q.device)
    _short_block[(kv_heads * count, splits, start.shape[0])](
        q,
        as_bits(k_pool),
        as_bits(v_pool),
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
        PAGE=k_pool.shape[1],
        MASK=sight.mask,
        WINDOW=-1 if sight.window is None else sight.window,
        SPLIT=splits > 1,
        FP8=fp8_mode(k_pool),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(q),
    )
    if splits > 1:
        _combine[(total * heads,)](
            part,
            lse,
            out,
            splits,
            DIM=dim,
            SPLITS=triton.next_power_of_2(splits),
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=4 if splits > 8 else 2,
            **pdl_options(q),
        )
    return out


@jit
def visible(row, position, start, bits, width, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """[M, N]: which of `position` [N] the block's `row` [M] sees; `bits` [M] of a tree."""
    if MASK == 0:
        last = (start + row)[:, None]
        seen = position[None, :] <= last
        if WINDOW >= 0:
            seen = seen & (position[None, :] > last - WINDOW)
    elif MASK == 1:
        seen = (position < start + width)[None, :] & (row >= 0)[:, None]
        if WINDOW >= 0:
            seen = seen & (position >= start - WINDOW)[None, :]
    else:
        behind = position - start  # row of the block, where it is one
        shift = tl.minimum(tl.maximum(behind, 0), 63).to(tl.int64)
        marked = ((bits[:, None] >> shift[None, :]) & 1) != 0
        seen = (behind < 0)[None, :] | (marked & (behind < width)[None, :])
    return seen


@jit
def pool_offsets(table, position, inside, first, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pool rows [N] int64 of `position` [N] = first + 0..N; `first` is a multiple of N."""
    if PAGE % BLOCK_N == 0:  # one page
        page = tl.load(table + first // PAGE).to(tl.int64)
        rows = page * PAGE + first % PAGE + (position - first)
    else:
        page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
        rows = page * PAGE + position % PAGE
    return rows


@jit
def load_kv(
    pool, offset, inside, d,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """[N, D] of a pool's rows; zeros outside, for 0 x what lies there may be NaN. WHOLE: all in."""
    if WHOLE and DIM == BLOCK_D:
        x = tl.load(pool + offset[:, None] + d[None, :])
    elif DIM == BLOCK_D:
        x = tl.load(pool + offset[:, None] + d[None, :], mask=inside[:, None], other=0)
    else:
        mask = inside[:, None] & (d < DIM)[None, :]
        x = tl.load(pool + offset[:, None] + d[None, :], mask=mask, other=0)
    if FP8 == 1:
        x = decode_e4m3(x)
    elif FP8 == 2:
        x = x.to(tl.float8e4nv, bitcast=True)
    return x


@jit
def to_l2(pointer, BYTES: tl.constexpr):
    """Asks for BYTES (a multiple of 16) at every pointer to be brought into the L2 cache."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, 0; cp.async.bulk.prefetch.L2.global [$1], $2;",
        "=r,l,r",
        [pointer, BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def soft_step(q, k, v, seen, qk_scale, top, total, acc):
    """One block of the online softmax, in powers of two.

    `top` [M]: largest score so far; `total` [M]: sum of weights; `acc` [M, D]: weighted values.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
    p = tl.exp2(s - safe[:, None])
    fade = tl.exp2(top - safe)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new, total, acc


@jit
def _short_block(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, start_ptr, tree_ptr, qk_scale,
    q_token, q_head, table_row,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One tile of a request's rows, one K/V head, one split of the context."""
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    split, splits = tl.program_id(1), tl.num_programs(1)
    request = tl.program_id(2)
    start = tl.load(start_ptr + request)
    table = table_ptr + request.to(tl.int64) * table_row

    # Positions any row of the tile can see, cut into equal spans of whole blocks.
    high = start + WIDTH
    low = start * 0
    if MASK == 0:
        high = tl.minimum(high, start + ((tile + 1) * BLOCK_M - 1) // GROUP + 1)
        if WINDOW >= 0:
            low = tl.maximum(start + (tile * BLOCK_M) // GROUP - WINDOW + 1, 0)
    elif WINDOW >= 0:
        low = tl.maximum(start - WINDOW, 0)
    base = low // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(high - base, splits), BLOCK_N) * BLOCK_N
    begin = base + split * span
    end = tl.minimum(begin + span, high)

    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    if PDL:  # what the context's first blocks need is on its way while q is still computed
        tl.extra.cuda.gdc_launch_dependents()
        soon = tl.minimum(begin + tl.arange(0, 2 * BLOCK_N), end - 1)
        early = tl.load(table + soon // PAGE).to(tl.int64) * PAGE + soon % PAGE
        early *= KV_HEADS * DIM
        to_l2(k_ptr + early, DIM * k_ptr.dtype.element_ty.primitive_bitwidth // 8)
        to_l2(v_ptr + early, DIM * v_ptr.dtype.element_ty.primitive_bitwidth // 8)
        tl.extra.cuda.gdc_wait()

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, d = m // GROUP, tl.arange(0, BLOCK_D)
    token = request.to(tl.int64) * WIDTH + row
    head = kv_head * GROUP + m % GROUP
    real = (m < GROUP * WIDTH)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + d[None, :], mask=real, other=0)
    bits = row
    if MASK == 2:
        bits = tl.load(tree_ptr + token, mask=m < GROUP * WIDTH, other=0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        inside = (position >= low) & (position < end)
        offset = pool_offsets(table, position, inside, first, PAGE, BLOCK_N) * (KV_HEADS * DIM)
        k = load_kv(k_ptr, offset, inside, d, DIM, BLOCK_D, FP8).to(q.dtype)
        v = load_kv(v_ptr, offset, inside, d, DIM, BLOCK_D, FP8).to(q.dtype)
        seen = visible(row, position, start, bits, WIDTH, MASK, WINDOW) & inside[None, :]
        top, total, acc = soft_step(q, k, v, seen, qk_scale, top, total, acc)

    weight = tl.where(total == 0.0, 1.0, total)
    acc = acc / weight[:, None]
    where = token * (KV_HEADS * GROUP) + head
    if SPLIT:
        if begin < end:
            target = (where * splits + split) * DIM
            tl.store(out_ptr + target[:, None] + d[None, :], acc, mask=real)
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(weight))
        tl.store(lse_ptr + where * splits + split, lse, mask=m < GROUP * WIDTH)
    else:
        target = (where * DIM)[:, None] + d[None, :]
        tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=real)


@jit
def _combine(
    part_ptr, lse_ptr, out_ptr, splits,
    DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One query row and head: its splits' results, weighted by their sums. part [T, Hq, S, D]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    where = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + where * splits + s, mask=s < splits, other=float("-inf"))
    some = lse > float("-inf")  # others wrote nothing
    top = tl.max(lse, 0)
    weight = tl.where(some, tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    part = tl.load(
        part_ptr + ((where * splits + s) * DIM)[:, None] + d[None, :],
        mask=(s < splits)[:, None] & (d < DIM)[None, :],  # not `some`: that would wait for lse
        other=0.0,
    )
    part = tl.where(some[:, None], part, 0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + where * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


# --- the twin ---------------------------------------------------------------------------------


def paged_attention_torch(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start: Tensor,
    width: int,
    sight: Sight,
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
    seen = _visible_torch(start, width, k.shape[1], sight, tree)  # [B, W, L]
    reached = seen.any(1)[:, :, None, None]
    k, v = k.where(reached, 0.0), v.where(reached, 0.0)
    scores = torch.einsum("bwhgd,blhd->bhgwl", tile, k) * scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    out = torch.einsum("bhgwl,blhd->bwhgd", scores.softmax(-1), v)
    return out.reshape(total, heads, dim).to(q.dtype)


def _visible_torch(
    start: Tensor, width: int, length: int, sight: Sight, tree: Tensor | None
) -> Tensor:
    """[B, W, L] bool."""
    position = torch.arange(length, device=start.device).view(1, 1, -1)
    begin = start.long().view(-1, 1, 1)
    last = begin + torch.arange(width, device=start.device).view(1, -1, 1)
    if sight.mask == TREE:
        assert tree is not None
        behind = position - begin
        bits = tree.view(-1, width, 1) >> behind.clamp(0, 63)
        return (behind < 0) | ((bits & 1).bool() & (behind < width))
    oldest = begin if sight.mask == BLOCK else last + 1
    seen = position < begin + width if sight.mask == BLOCK else position <= last
    if sight.window is not None:
        seen = seen & (position >= oldest - sight.window)
    return seen.expand(-1, width, -1)
