# mypy: allow-untyped-defs, allow-incomplete-defs
"""Paged attention for prompt chunks: many tokens per request, as many as each has.

The tokens are cut into tiles on the host, which knows their counts exactly. A CTA takes one tile of
one K/V head: BLOCK_M / group tokens with all query heads that share the head, so that little of the
triangle under a causal mask is wasted. Requests run one after the other, so that their K/V stays in
L2; the longest comes first, and of each its last tile.

`prefill_sm90.py` has a kernel in CUDA C++ for Hopper, which is used where it can be (`why_unfit`
there); all else takes the Triton kernel here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.kernels.attention import prefill_sm90
from forerun.kernels.attention.decode import (
    TREE,
    MaskSpec,
    needs_int64_offsets,
    paged_attention_ref,
)
from forerun.kernels.attention.decode_kernels import (
    attends,
    begin_softmax,
    cast_q,
    kv_slots_of,
    load_kv,
    load_page_ids,
    online_softmax_step,
    tanh_of,
)
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.attention.tile_map import Spans, TileMap
from forerun.kernels.attention.tiles import TileConfig, prefill_tile_config
from forerun.kernels.runtime.fp8 import as_bits, fp8_mode
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton


def prefill_attention(
    q: Tensor,
    kv: PagedKV,
    spans: Spans,
    tile_map: TileMap | None,
    mask: MaskSpec,
    scale: float,
    config: TileConfig | None = None,
) -> Tensor:
    """Attention of ragged chunks; their K/V is in the pool already.

    Args:
        q: [T, Hq, D]; tokens at any stride.
        kv: the cache.
        spans: (start, tokens) of each request, on the host.
        tile_map: from `build_tile_map` with `prefill_tile_config(...).block_m // group` tokens per
            tile, whichever kernel runs; the reference implementation needs none.
        mask: causal, or the whole chunk as one block, sliding or not.
        scale: of the scores, positive.
        config: the Triton kernel with this tile, instead of the fastest kernel and its tile.

    Returns:
        [T, Hq, D] in q's dtype.
    """
    if not use_triton(q) or tile_map is None:
        return prefill_attention_ref(q, kv, spans, mask, scale)
    total, heads, dim = q.shape
    gpu, rows = gpu_of(q.device), tile_map.tokens_per_tile * (heads // kv.num_kv_heads)
    need = gpu, q.dtype, kv.k.dtype, dim, kv.page_size
    plain = mask.sinks is None and not mask.needs_triton
    if config is None and plain and prefill_sm90.why_unfit(*need) is None:
        return prefill_sm90.launch(q, kv, tile_map, mask, scale)
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    config = config or prefill_tile_config(gpu, dim, q.dtype)
    assert rows <= config.block_m, "a tile has no room for its heads"
    _prefill_attention_kernel[(kv.num_kv_heads, tile_map.entries.shape[0])](
        q, as_bits(kv.k), as_bits(kv.v), out, kv.page_table, kv.start, tile_map.entries,
        mask.sinks, mask.qk_scale(scale), q.stride(0), q.stride(1), kv.page_table.stride(0),
        TILE_TOKENS=tile_map.tokens_per_tile, GROUP=heads // kv.num_kv_heads,
        KV_HEADS=kv.num_kv_heads, DIM=dim, PAGE_SIZE=kv.page_size,
        MASK=mask.mask, WINDOW=mask.window_constant,
        FP8=fp8_mode(kv.k), INT64_OFFSETS=needs_int64_offsets(kv.k),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=triton.next_power_of_2(dim),
        SOFTCAP=mask.softcap_constant,
        num_warps=config.num_warps, num_stages=config.num_stages, **config.launch_options(),
    )  # fmt: skip
    return out


@jit
def _prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, page_table, start_ptr, tile_map, sinks_ptr, qk_scale,
    q_token_stride, q_head_stride, page_table_stride,
    TILE_TOKENS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, FP8: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr = 0.0,
):  # fmt: skip
    """One CTA per K/V head and entry of the tile map."""
    kv_head = tl.program_id(0)
    entry = tile_map + tl.program_id(1) * 4
    request = tl.load(entry)
    begin, count, first_token = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    start = tl.load(start_ptr + request)
    table = page_table + request.to(tl.int64) * page_table_stride

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token_index = first_token + m // GROUP
    inside = (m < TILE_TOKENS * GROUP) & (token_index < count)
    q_mask = inside[:, None] & (d < DIM)[None, :]
    token = (begin + token_index).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    q_ptr += (token * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
    q = tl.load(q_ptr, mask=q_mask, other=0)
    q_type: tl.constexpr = q_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float16 if FP8 > 0 and q_type.primitive_bitwidth == 16 else q_type
    q = cast_q(q, dtype)

    # Blocks within [clear, full) need no mask.
    last_token = tl.minimum(first_token + TILE_TOKENS, count) - 1
    low, high = start * 0, start + count
    clear, full = low, high
    if MASK == 0:
        full, high = start + first_token + 1, start + last_token + 1
        if WINDOW >= 0:
            low = tl.maximum(start + first_token - WINDOW + 1, 0)
            clear = tl.maximum(start + last_token - WINDOW + 1, 0)
    elif MASK == 3:
        full = tl.minimum(start + first_token + WINDOW, high)
        high = tl.minimum(start + last_token + WINDOW, high)
        low = tl.maximum(start + first_token - WINDOW + 1, 0)
        clear = tl.maximum(start + last_token - WINDOW + 1, 0)
    elif WINDOW >= 0:
        low = tl.maximum(start - WINDOW, 0)
        clear = low

    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    row_max, row_sum = begin_softmax(sinks_ptr, head, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    softmax_scale = qk_scale
    if SOFTCAP > 0.0:
        softmax_scale = SOFTCAP * 1.4426950408889634  # log2(e)
    base = low // BLOCK_N * BLOCK_N
    page = load_page_ids(table, base, low, high, PAGE_SIZE, BLOCK_N)
    for first in range(base, high, BLOCK_N):
        kv_slots = kv_slots_of(page, first, low, high, PAGE_SIZE, BLOCK_N, INT64_OFFSETS)
        offset = kv_slots * (KV_HEADS * DIM)
        k = load_kv(k_ptr, offset, d, DIM, BLOCK_D, FP8).to(dtype)
        v = load_kv(v_ptr, offset, d, DIM, BLOCK_D, FP8).to(dtype)
        page = load_page_ids(table, first + BLOCK_N, low, high, PAGE_SIZE, BLOCK_N)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP > 0.0:
            s = tanh_of(s, qk_scale)
        if (first + BLOCK_N > full) | (first < clear):
            position = first + tl.arange(0, BLOCK_N)
            visible = attends(token_index, position, start, token_index, count, MASK, WINDOW)
            s = tl.where(visible, s, float("-inf"))
        row_max, row_sum, acc = online_softmax_step(s, v, softmax_scale, row_max, row_sum, acc)

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    target = ((token * (KV_HEADS * GROUP) + head) * DIM)[:, None] + d[None, :]
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


def prefill_attention_ref(
    q: Tensor, kv: PagedKV, spans: Spans, mask: MaskSpec, scale: float
) -> Tensor:
    """Reference implementation of `prefill_attention`: one request after the other."""
    assert mask.mask != TREE
    parts, first = [], 0
    for i, (begin, count) in enumerate(spans):
        used = -(-(begin + count) // kv.page_size)
        own = replace(kv, page_table=kv.page_table[i : i + 1, :used], start=kv.start[i : i + 1])
        parts.append(paged_attention_ref(q[first : first + count], own, count, mask, scale))
        first += count
    return torch.cat(parts)
