"""Attention in plain PyTorch: runs anywhere, and is the reference for every other backend.

K/V pages of a request are gathered into a contiguous tensor and attended with an additive mask.
Which tokens count is decided on the device; the host's bound only sets how many pages are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Buffers,
    Plan,
)
from forerun.attention.capabilities import Capabilities, LayerMask, Mask
from forerun.kernels.attention.mla_write import write_latent_ref
from forerun.kernels.attention.paged_kv import write_kv_ref
from forerun.kernels.runtime.fp8 import as_bits
from forerun.kernels.speculation.ragged import RaggedRows
from forerun.kernels.speculation.tree import unpack_bits
from forerun.kvcache.layouts import LatentKV


@dataclass
class _Segment:
    """B requests of W tokens each: tokens [first, first + B * W) of the batch."""

    first: int
    batch: int
    q_len: int
    start: Tensor  # [B, 1] int64
    pages: Tensor  # [B * n] page ids to gather
    tree: Tensor | None = None  # [B, W, words] int64, of AttentionBatch
    rows: RaggedRows | None = None  # its tokens are packed
    masks: dict[LayerMask, Tensor] = field(default_factory=dict)  # [B, 1, group * W, n * P]


@dataclass
class NativePlan(Plan):
    kv_slots: Tensor  # [T] int64
    segments: list[_Segment]


class TorchNative(AttentionBackend):
    name = "torch_native"
    # Not for graphs: it gathers as many pages as the host bounds, which a graph would freeze.
    capabilities = Capabilities(
        graph=False,
        mla=True,
        mixed_layouts=True,
        sinks=True,
        logit_softcap=True,
        ragged_steps=True,
    )

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> NativePlan:
        page = self.pools.page_size
        if batch.q_len is not None:
            size = batch.start.shape[0]
            start = batch.start.long().unsqueeze(1)  # [B, 1]
            positions = start + torch.arange(batch.q_len, device=start.device)  # [B, W]
            used = -(-batch.kv_len_ub // page)
            table = batch.page_table[:, :used]
            pages = batch.page_table.gather(1, positions // page).long()
            rows, pages_of = batch.rows, table.reshape(-1)
            segment = _Segment(0, size, batch.q_len, start, pages_of, batch.tree, rows)
            of_places = (pages * page + positions % page).reshape(-1)
            return NativePlan(of_places if rows is None else rows.pack(of_places), [segment])
        assert batch.ragged is not None
        kv_slots, segments, first = [], [], 0
        for i, (begin, count) in enumerate(batch.ragged):
            table = batch.page_table[i : i + 1]
            positions = torch.arange(begin, begin + count, device=table.device)
            kv_slots.append(table[0, positions // page].long() * page + positions % page)
            used = -(-(begin + count) // page)
            begins = batch.start[i : i + 1].long().unsqueeze(1)
            segments.append(_Segment(first, 1, count, begins, table[0, :used]))
            first += count
        return NativePlan(torch.cat(kv_slots), segments)

    def write(self, plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
        assert isinstance(plan, NativePlan)
        write_kv_ref(k, v, plan.kv_slots, self.pools.k(layer), self.pools.v(layer))

    def write_latent(self, plan: Plan, layer: int, latent: Tensor) -> None:
        assert isinstance(plan, NativePlan)
        write_latent_ref(latent, plan.kv_slots, self.pools.latent(layer))

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, NativePlan)
        k_pool, v_pool = self.pools.k(layer), self.pools.v(layer)
        parts = []
        for seg in plan.segments:
            k, v = _gather(k_pool, seg, q.dtype), _gather(v_pool, seg, q.dtype)
            parts.append(_packed(seg, _attend(seg, spec, _of(seg, q), k, v)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_latent(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, NativePlan)
        pool = self.pools.latent(layer).unsqueeze(2)  # one K/V head
        kind = self.pools.layout.layers[layer]
        assert isinstance(kind, LatentKV)
        parts = []
        for seg in plan.segments:
            k = _gather(pool, seg, q.dtype)  # [B, 1, L, Dl + Dr]
            out = _attend(seg, spec, _of(seg, q), k, k[..., : kind.latent_dim])
            parts.append(_packed(seg, out))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of(seg: _Segment, q: Tensor) -> Tensor:
    """The segment's part of q [T, Hq, D], W tokens of each request."""
    if seg.rows is not None:
        return seg.rows.unpack(q)
    count = seg.batch * seg.q_len
    return q if count == q.shape[0] else q[seg.first : seg.first + count]


def _packed(seg: _Segment, out: Tensor) -> Tensor:
    return out if seg.rows is None else seg.rows.pack(out)


def _gather(pool: Tensor, seg: _Segment, dtype: torch.dtype) -> Tensor:
    """Pages [pages, P, Hkv, D] of a segment as [B, Hkv, L, D] of `dtype`."""
    pages = as_bits(pool).index_select(0, seg.pages).view(pool.dtype).to(dtype)
    return pages.view(seg.batch, -1, pool.shape[2], pool.shape[3]).transpose(1, 2)


def _attend(seg: _Segment, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B * W, Hq, D], k [B, Hkv, L, D], v [B, Hkv, L, Dv] -> [B * W, Hq, Dv]."""
    heads, dim, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    group = heads // kv_heads
    bias = seg.masks.get(spec.mask)
    if bias is None:
        bias = _mask(seg, spec.mask, k.shape[2], q.dtype)
        if seg.q_len > 1:  # a group's heads become rows of one tile: K/V is not repeated
            bias = bias.repeat(1, 1, group, 1)
        seg.masks[spec.mask] = bias
    tile = q.view(seg.batch, seg.q_len, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    tile = tile.reshape(seg.batch, kv_heads, group * seg.q_len, dim)
    if spec.sinks is None and spec.logit_softcap is None:
        out = F.scaled_dot_product_attention(tile, k, v, attn_mask=bias, scale=spec.scale)
    else:
        out = _softmax_attention(tile, k, v, bias, spec)
    out = out.view(seg.batch, kv_heads, group, seg.q_len, v.shape[3]).permute(0, 3, 1, 2, 4)
    return out.reshape(seg.batch * seg.q_len, heads, v.shape[3])


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, spec: AttentionSpec
) -> Tensor:
    """Attends with soft-cap and sinks, in float32; q [B, Hkv, group * W, D]."""
    scores = (q.float() @ k.float().transpose(2, 3)) * spec.scale
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * torch.tanh(scores / spec.logit_softcap)
    scores = scores + bias.float()
    if spec.sinks is None:
        weights = scores.softmax(-1)
    else:
        kv_heads, rows = scores.shape[1], scores.shape[2]
        sinks = spec.sinks.float().view(kv_heads, -1, 1)
        sinks = sinks.expand(-1, -1, rows // sinks.shape[1]).reshape(1, kv_heads, rows, 1)
        joined = torch.cat([scores, sinks.expand(scores.shape[0], -1, -1, -1)], -1)
        weights = joined.softmax(-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)


def _mask(seg: _Segment, mask: LayerMask, length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, W, L]: 0 where a token sees a K/V position."""
    kv = torch.arange(length, device=seg.start.device).view(1, 1, -1)
    start = seg.start.unsqueeze(2)  # [B, 1, 1]
    last = start + torch.arange(seg.q_len, device=kv.device).view(1, -1, 1)  # [B, W, 1]
    if mask.mask is Mask.BLOCK:
        seen = (kv < start + seg.q_len).expand(-1, seg.q_len, -1)
        oldest = start if mask.window is None else start - mask.window
    elif mask.mask is Mask.SLIDING_BLOCK:
        assert mask.window is not None
        seen = (kv < start + seg.q_len) & (kv < last + mask.window)
        oldest = last - mask.window + 1
    else:
        seen = kv <= last
        oldest = last if mask.window is None else last - mask.window + 1
    if seg.tree is not None and mask.mask is Mask.CAUSAL:
        seen, oldest = _tree_mask(seg, seg.tree, kv, mask.window)
    if mask.window is not None:
        seen = seen & (kv >= oldest)
    bias = torch.zeros(seen.shape, dtype=dtype, device=kv.device)
    return bias.masked_fill_(~seen, float("-inf")).unsqueeze(1)


def _tree_mask(
    seg: _Segment, words: Tensor, kv: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """(what each token of a tree sees [B, W, L], the oldest position in its window)."""
    start = seg.start.unsqueeze(2)  # [B, 1, 1]
    own = unpack_bits(words, seg.q_len)  # [B, W, W]
    token = kv - start  # of the tree, where it is >= 0
    inside = own.gather(2, token.clamp(0, seg.q_len - 1).expand(-1, seg.q_len, -1))
    seen = torch.where(token < 0, True, inside & (token < seg.q_len))
    if window is None:
        return seen, start
    # A window counts positions, and a tree's token stands as deep as it has ancestors.
    last = start + own.sum(2, keepdim=True) - 1
    tree_depth = own.sum(2).unsqueeze(1).gather(2, token.clamp(0, seg.q_len - 1)) - 1
    near = torch.where(token < 0, kv, start + tree_depth) > last - window
    return seen & near, torch.zeros_like(start)
