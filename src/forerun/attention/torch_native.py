"""Attention in plain PyTorch: runs anywhere, and is the reference for every other backend.

K/V pages of a request are gathered into a dense row and attended with an additive mask. Which
rows count is decided on the device; the host's bound only sets how many pages are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionNeed,
    LayerMask,
    Mask,
    Plan,
)
from forerun.kernels.attention.paged_kv import write_kv_ref
from forerun.kernels.runtime.fp8 import as_bits


@dataclass
class _Segment:
    """B requests of W rows each; they occupy rows [first, first + B * W) of the batch."""

    first: int
    batch: int
    width: int
    start: Tensor  # [B, 1] int64
    pages: Tensor  # [B * n] page ids to gather
    tree: Tensor | None = None  # [B, W] int64, of AttentionBatch
    masks: dict[LayerMask, Tensor] = field(default_factory=dict)  # [B, 1, rows, n * P] additive


@dataclass
class NativePlan(Plan):
    rows: Tensor  # [T] int64: pool row of every query row
    segments: list[_Segment]


class TorchNative(AttentionBackend):
    name = "torch_native"

    @classmethod
    def why_not(cls, need: AttentionNeed) -> list[str]:
        reasons = []
        if need.mla:
            reasons.append("it has no latent (MLA) attention")
        if need.graph:
            reasons.append(
                "it gathers as many pages as the host bounds, which a graph would freeze "
                "(disable_cuda_graph lets it serve)"
            )
        return reasons

    def plan(self, batch: AttentionBatch) -> NativePlan:
        page = self.pools.page_size
        if batch.width is not None:
            size = batch.start.shape[0]
            start = batch.start.long().unsqueeze(1)  # [B, 1]
            positions = start + torch.arange(batch.width, device=start.device)  # [B, W]
            used = -(-batch.kv_len_ub // page)
            table = batch.page_table[:, :used]
            rows = batch.page_table.gather(1, positions // page).long() * page + positions % page
            segment = _Segment(0, size, batch.width, start, table.reshape(-1), batch.tree)
            return NativePlan(rows.reshape(-1), [segment])
        assert batch.ragged is not None
        rows_of, segments, first = [], [], 0
        for i, (begin, count) in enumerate(batch.ragged):
            table = batch.page_table[i : i + 1]
            positions = torch.arange(begin, begin + count, device=table.device)
            rows_of.append(table[0, positions // page].long() * page + positions % page)
            used = -(-(begin + count) // page)
            begins = batch.start[i : i + 1].long().unsqueeze(1)
            segments.append(_Segment(first, 1, count, begins, table[0, :used]))
            first += count
        return NativePlan(torch.cat(rows_of), segments)

    def write(self, plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
        assert isinstance(plan, NativePlan)
        write_kv_ref(k, v, plan.rows, self.pools.k(layer), self.pools.v(layer))

    def attend(self, plan: Plan, layer: int, mask: LayerMask, scale: float, q: Tensor) -> Tensor:
        assert isinstance(plan, NativePlan)
        parts = []
        for seg in plan.segments:
            count = seg.batch * seg.width
            rows = q if count == q.shape[0] else q[seg.first : seg.first + count]
            parts.append(self._attend(seg, layer, mask, scale, rows))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self, seg: _Segment, layer: int, mask: LayerMask, scale: float, q: Tensor
    ) -> Tensor:
        heads, dim = q.shape[1], q.shape[2]
        kv_heads = self.pools.k(layer).shape[2]
        group = heads // kv_heads
        k = self._gather(self.pools.k(layer), seg, q.dtype)  # [B, Hkv, L, D]
        v = self._gather(self.pools.v(layer), seg, q.dtype)
        bias = seg.masks.get(mask)
        if bias is None:
            bias = self._mask(seg, mask, k.shape[2], q.dtype)
            if seg.width > 1:  # a group's query heads become rows of one tile: K/V is not repeated
                bias = bias.repeat(1, 1, group, 1)
            seg.masks[mask] = bias
        tile = q.view(seg.batch, seg.width, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        tile = tile.reshape(seg.batch, kv_heads, group * seg.width, dim)
        out = F.scaled_dot_product_attention(tile, k, v, attn_mask=bias, scale=scale)
        out = out.view(seg.batch, kv_heads, group, seg.width, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(seg.batch * seg.width, heads, dim)

    def _gather(self, pool: Tensor, seg: _Segment, dtype: torch.dtype) -> Tensor:
        """Pages [pages, P, Hkv, D] of a segment as [B, Hkv, L, D] of `dtype`."""
        rows = as_bits(pool).index_select(0, seg.pages).view(pool.dtype).to(dtype)
        return rows.view(seg.batch, -1, pool.shape[2], pool.shape[3]).transpose(1, 2)

    @staticmethod
    def _mask(seg: _Segment, mask: LayerMask, length: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, W, L]: 0 where a query row sees a K/V position."""
        kv = torch.arange(length, device=seg.start.device).view(1, 1, -1)
        start = seg.start.unsqueeze(2)  # [B, 1, 1]
        last = start + torch.arange(seg.width, device=kv.device).view(1, -1, 1)  # [B, W, 1]
        if mask.mask is Mask.BLOCK:
            seen = (kv < start + seg.width).expand(-1, seg.width, -1)
            oldest = start if mask.window is None else start - mask.window
        else:
            seen = kv <= last
            oldest = last if mask.window is None else last - mask.window + 1
        if seg.tree is not None and mask.mask is Mask.CAUSAL:
            seen, oldest = TorchNative._tree(seg, seg.tree, kv, mask.window)
        if mask.window is not None:
            seen = seen & (kv >= oldest)
        bias = torch.zeros(seen.shape, dtype=dtype, device=kv.device)
        return bias.masked_fill_(~seen, float("-inf")).unsqueeze(1)

    @staticmethod
    def _tree(seg: _Segment, bits: Tensor, kv: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """(what each row of a tree sees [B, W, L], the oldest position in its window)."""
        start = seg.start.unsqueeze(2)  # [B, 1, 1]
        own = (bits.unsqueeze(2) >> torch.arange(seg.width, device=kv.device)) & 1  # [B, W, W]
        row = kv - start  # of the tree, where it is >= 0
        inside = own.gather(2, row.clamp(0, seg.width - 1).expand(-1, seg.width, -1)).bool()
        seen = torch.where(row < 0, True, inside & (row < seg.width))
        if window is None:
            return seen, start
        # A window counts positions, and a tree's row stands as deep as it has ancestors.
        last = start + own.sum(2, keepdim=True) - 1
        deep = own.sum(2).unsqueeze(1).gather(2, row.clamp(0, seg.width - 1)) - 1
        near = torch.where(row < 0, kv, start + deep) > last - window
        return seen & near, torch.zeros_like(start)
