# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention of prompt chunks over K and V of every head, unpaged: MLA with expanded latent rows.

K has Dn + Dr values and V has Dv (192 and 128 for DeepSeek). The contexts of the requests lie one
after another; a chunk is the end of its request's context. The mask is causal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention.decode import LOG2E
from forerun.kernels.attention.decode_kernels import attends, online_softmax_step
from forerun.kernels.attention.tile_map import Spans, TileMap
from forerun.kernels.attention.tiles import TileConfig, expanded_tile_config, padded
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl, use_triton


@dataclass(frozen=True)
class ExpandedKV:
    """K and V of H heads for S positions, and where each of B requests has its own."""

    k: Tensor  # [S, H, Dn + Dr]; positions and heads at any stride
    v: Tensor  # [S, H, Dv]; likewise
    cu_kv_lens: Tensor  # [B + 1] int32, cumulative context lengths, the chunks included


def expanded_attention(
    q: Tensor,
    kv: ExpandedKV,
    spans: Spans,
    tile_map: TileMap | None,
    scale: float,
    window: int | None = None,
    config: TileConfig | None = None,
) -> Tensor:
    """Causal attention of ragged chunks.

    Args:
        q: [T, H, Dn + Dr]; tokens and heads at any stride.
        kv: the expanded K and V.
        spans: (start, tokens) of each request, on the host.
        tile_map: from `build_tile_map` with `config.block_m` tokens per tile; the reference
            implementation needs none.
        scale: of the scores.
        window: a token at p attends to (p - window, p]; None: to all before it.
        config: instead of the tuned tile.

    Returns:
        [T, H, Dv] in q's dtype.
    """
    if not use_triton(q) or tile_map is None:
        return expanded_attention_ref(q, kv, spans, scale, window)
    total, heads, dim = q.shape
    v_dim = kv.v.shape[2]
    if config is None:
        config = expanded_tile_config(gpu_of(q.device), dim, v_dim, q.dtype)
    assert tile_map.tokens_per_tile == config.block_m, "the tile map is for other tiles"
    out = torch.empty((total, heads, v_dim), dtype=q.dtype, device=q.device)
    main, rest = split_dim(dim)
    _expanded_attention_kernel[(heads, tile_map.entries.shape[0])](
        q, kv.k, kv.v, out, kv.cu_kv_lens, tile_map.entries, scale * LOG2E,
        q.stride(0), q.stride(1), kv.k.stride(0), kv.k.stride(1), kv.v.stride(0), kv.v.stride(1),
        DIM=dim, V_DIM=v_dim, WINDOW=-1 if window is None else window,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=main, BLOCK_R=rest,
        BLOCK_V=padded(v_dim), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def split_dim(dim: int) -> tuple[int, int]:
    """A head dim as one or two powers of two that hold it: 192 is (128, 64), 64 is (64, 0)."""
    whole = padded(dim)
    if whole == dim or dim <= 64:
        return whole, 0
    return whole // 2, padded(dim - whole // 2)


@jit
def _load_rows(pointer, offset, d, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[N, D] at `offset` [N] of a tensor; zeros past DIM, and where not `inside` (None: all)."""
    if inside is None:
        if DIM >= PADDED:
            x = tl.load(pointer + offset[:, None] + d[None, :])
        else:
            x = tl.load(pointer + offset[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0)
    else:
        mask = inside[:, None] & (d < DIM)[None, :]
        x = tl.load(pointer + offset[:, None] + d[None, :], mask=mask, other=0)
    return x


@jit
def _expanded_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_kv_lens, tile_map, qk_scale, q_token_stride, q_head_stride,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    DIM: tl.constexpr, V_DIM: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One CTA per head and entry of the tile map; BLOCK_R: the rest of a head dim, or 0."""
    head = tl.program_id(0).to(tl.int64)
    entry = tile_map + tl.program_id(1) * 4
    request = tl.load(entry)
    begin, count, first_token = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    context = tl.load(cu_kv_lens + request)
    start = tl.load(cu_kv_lens + request + 1) - context - count
    k_ptr += context.to(tl.int64) * k_token_stride + head * k_head_stride
    v_ptr += context.to(tl.int64) * v_token_stride + head * v_head_stride

    m, d, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    r, e = tl.arange(0, BLOCK_R if BLOCK_R > 0 else 1), tl.arange(0, BLOCK_V)
    token_index = first_token + m
    inside = token_index < count
    token = (begin + token_index).to(tl.int64)
    q_ptr += head * q_head_stride
    q_at = token * q_token_stride
    q = _load_rows(q_ptr, q_at, d, inside, DIM, BLOCK_D)
    if BLOCK_R > 0:
        q_rest = _load_rows(q_ptr + BLOCK_D, q_at, r, inside, DIM - BLOCK_D, BLOCK_R)

    # Blocks within [clear, full) need no mask.
    last_token = tl.minimum(first_token + BLOCK_M, count) - 1
    low, clear = start * 0, start * 0
    full, high = start + first_token + 1, start + last_token + 1
    if WINDOW >= 0:
        low = tl.maximum(start + first_token - WINDOW + 1, 0)
        clear = tl.maximum(start + last_token - WINDOW + 1, 0)

    row_max = tl.full([BLOCK_M], -1e38, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
        # Past the context are other requests' K and V, which may be NaN: the last is repeated.
        position = tl.minimum(first + n, high - 1).to(tl.int64)
        at = position * k_token_stride
        k = _load_rows(k_ptr, at, d, None, DIM, BLOCK_D)
        v = _load_rows(v_ptr, position * v_token_stride, e, None, V_DIM, BLOCK_V)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BLOCK_R > 0:
            k_rest = _load_rows(k_ptr + BLOCK_D, at, r, None, DIM - BLOCK_D, BLOCK_R)
            s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision="ieee")
        if (first + BLOCK_N > full) | (first < clear):
            visible = attends(token_index, first + n, start, token_index, count, 0, WINDOW)
            s = tl.where(visible, s, float("-inf"))
        row_max, row_sum, acc = online_softmax_step(s, v, qk_scale, row_max, row_sum, acc)

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    target = ((token * tl.num_programs(0) + head) * V_DIM)[:, None] + e[None, :]
    mask = inside[:, None] & (e < V_DIM)[None, :]
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=mask)


def expanded_attention_ref(
    q: Tensor, kv: ExpandedKV, spans: Spans, scale: float, window: int | None = None
) -> Tensor:
    """Reference implementation of `expanded_attention`: one request after the other.

    Computes in float32, or in q's dtype where that is wider.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    parts, first, context = [], 0, 0
    for start, count in spans:
        own = slice(context, context + start + count)
        k, v = kv.k[own].to(exact), kv.v[own].to(exact)
        scores = torch.einsum("thd,nhd->htn", q[first : first + count].to(exact), k) * scale
        position = torch.arange(start + count, device=q.device)
        last = position[start:].unsqueeze(1)
        seen = position <= last
        if window is not None:
            seen = seen & (position > last - window)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        parts.append(torch.einsum("htn,nhd->thd", weights, v))
        first, context = first + count, context + start + count
    return torch.cat(parts).to(q.dtype)
