"""Attention by our own Triton kernels: NVIDIA and AMD GPUs.

A plan of fixed width can be captured into a device graph: lengths and page tables are read on
the device, and the host's bound sets only into how many splits a context is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionNeed,
    KVNormRope,
    LayerMask,
    Mask,
    Plan,
    QKNormRope,
    RopeInput,
)
from forerun.kernels.attention.decode import BLOCK, CAUSAL, TREE, MaskSpec, paged_attention
from forerun.kernels.attention.paged_kv import compute_kv_slots, write_kv
from forerun.kernels.attention.prefill import TileMap, map_tiles, prefill_attention
from forerun.kernels.attention.tiles import choose_splits, prefill_tiles
from forerun.kernels.elementwise.qk_norm_rope import kv_norm_rope_write, qk_norm_rope_write
from forerun.kernels.runtime.fp8 import FP8
from forerun.kernels.runtime.gpu import gpu_of, have_triton
from forerun.platform.device import upload

MASKS = {Mask.CAUSAL: CAUSAL, Mask.BLOCK: BLOCK, Mask.CUSTOM: TREE}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class TritonPlan(Plan):
    """`tree` [T] int64, bit j: the row sees row j of its block; None: no tree."""

    batch: AttentionBatch
    rows: Tensor  # [T] int64: pool row of every query row
    splits: int
    tile_map: TileMap | None  # of ragged rows
    tree: Tensor | None = None


class TritonAttention(AttentionBackend):
    name = "triton"

    @classmethod
    def why_not(cls, need: AttentionNeed) -> list[str]:
        reasons = []
        if not have_triton(need.device):
            reasons.append(
                "Triton is not installed; pip install triton"
                if need.device == "cuda"
                else f"it needs an NVIDIA or AMD GPU, not {need.device}"
            )
        if need.mla:
            reasons.append("it has no latent (MLA) attention")
        if need.dtype not in DTYPES:
            reasons.append(f"it computes in float32, float16 and bfloat16, not {need.dtype}")
        if need.kv_dtype not in (None, FP8, *DTYPES):
            reasons.append(f"it reads K/V in those and float8_e4m3fn, not {need.kv_dtype}")
        if not 16 <= need.head_dim <= 256:
            reasons.append(f"head dim {need.head_dim} is not within 16 to 256")
        if any(m.mask is Mask.CUSTOM and m.window is not None for m in need.masks):
            reasons.append("its custom (tree) mask has no window")
        return reasons

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        """K/V before `start` may be read ahead of the kernel that runs before `attend`.

        So a plan without `rows` is made after what is written there: finding them waits for it.
        """
        page, dim = self.pools.page_size, self.need.head_dim
        requests, device = batch.start.shape[0], batch.start.device
        group = self.need.num_heads // self.need.num_kv_heads
        if batch.width is not None:
            total = requests * batch.width
            rows = batch.rows
            if rows is None:
                rows = compute_kv_slots(
                    batch.page_table, batch.start, None, batch.width, total, page
                )
            splits = choose_splits(
                device,
                requests,
                group * batch.width,
                self.need.num_kv_heads,
                batch.kv_len_ub,
                dim,
                self.need.kv_dtype or self.need.dtype,
                page,
            )
            tree = None if batch.tree is None else batch.tree.flatten()
            return TritonPlan(batch, rows, splits, None, tree)
        assert batch.ragged is not None
        counts = [rows for _, rows in batch.ragged]
        ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        first = upload(ends, device)
        rows = compute_kv_slots(
            batch.page_table, batch.start, first, max(counts), sum(counts), page
        )
        # What `map_tiles` uploads lies between `rows` and who reads them before waiting (pdl.py).
        tile_rows = max(1, prefill_tiles(gpu_of(device), dim, self.need.dtype).block_m // group)
        return TritonPlan(
            batch, rows, 1, map_tiles(batch.ragged, tile_rows, partial(upload, device=device))
        )

    def write(self, plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
        assert isinstance(plan, TritonPlan)
        write_kv(k, v, plan.rows, self.pools.k(layer), self.pools.v(layer))

    def rope_write(
        self, plan: Plan, layer: int, qkv: Tensor, norm_rope: QKNormRope, rope: RopeInput
    ) -> Tensor:
        assert isinstance(plan, TritonPlan)
        return qk_norm_rope_write(
            qkv,
            norm_rope.heads,
            norm_rope.norms,
            rope.table,
            rope.positions,
            plan.rows,
            self.pools.k(layer),
            self.pools.v(layer),
        )

    def rope_write_layers(
        self,
        plan: Plan,
        kv: Tensor,
        norm_rope: KVNormRope,
        rope: RopeInput,
        new: Tensor | None,
    ) -> None:
        assert isinstance(plan, TritonPlan)
        kv_norm_rope_write(
            kv,
            norm_rope.norms,
            rope.table,
            rope.positions,
            plan.rows,
            self.pools.dense,
            new,
        )

    def attend(self, plan: Plan, layer: int, mask: LayerMask, scale: float, q: Tensor) -> Tensor:
        assert isinstance(plan, TritonPlan)
        kind = TREE if plan.tree is not None else MASKS[mask.mask]
        batch, mask_spec = plan.batch, MaskSpec(kind, mask.window)
        k, v = self.pools.k(layer), self.pools.v(layer)
        if batch.width is not None:
            return paged_attention(
                q,
                k,
                v,
                batch.page_table,
                batch.start,
                batch.width,
                mask_spec,
                scale,
                plan.splits,
                plan.tree,
            )
        assert batch.ragged is not None
        return prefill_attention(
            q,
            k,
            v,
            batch.page_table,
            batch.start,
            batch.ragged,
            plan.tile_map,
            mask_spec,
            scale,
        )
