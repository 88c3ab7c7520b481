"""Attention in our own Triton kernels: NVIDIA and AMD GPUs.

A decode plan can be captured into a device graph: lengths and page tables are read on the device,
and the host's bound only sets into how many splits a context is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Buffers,
    KVNormRope,
    Plan,
    QKNormRope,
    RopeInput,
)
from forerun.attention.capabilities import AttentionNeed, Capabilities, Mask
from forerun.kernels.attention.decode import BLOCK, CAUSAL, TREE, MaskSpec, paged_attention
from forerun.kernels.attention.paged_kv import PagedKV, compute_kv_slots, write_kv
from forerun.kernels.attention.prefill import TileMap, build_tile_map, prefill_attention
from forerun.kernels.attention.tiles import (
    DecodeProblem,
    best_page_size,
    choose_num_splits,
    prefill_tile_config,
)
from forerun.kernels.elementwise.qk_norm_rope import (
    RopePositions,
    kv_norm_rope_write,
    qk_norm_rope_write,
)
from forerun.kernels.runtime.fp8 import FP8
from forerun.kernels.runtime.gpu import gpu_of, have_triton
from forerun.platform.device import upload

MASKS = {Mask.CAUSAL: CAUSAL, Mask.BLOCK: BLOCK, Mask.CUSTOM: TREE}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class TritonPlan(Plan):
    """`tree` [T] int64, bit j: the token sees token j of its request; None: no tree."""

    batch: AttentionBatch
    kv_slots: Tensor  # [T] int64
    num_splits: int
    tile_map: TileMap | None  # of ragged chunks
    tree: Tensor | None = None


class TritonAttention(AttentionBackend):
    name = "triton"

    capabilities = Capabilities(
        devices=frozenset({"cuda", "cpu"}),  # on a CPU: Triton's interpreter
        windows=frozenset({Mask.CAUSAL, Mask.BLOCK}),
        head_dims=range(16, 257),
        dtypes=DTYPES,
        kv_dtypes=(*DTYPES, FP8),
    )

    @classmethod
    def why_not(cls, need: AttentionNeed) -> list[str]:
        reasons = super().why_not(need)
        if not have_triton(need.device):
            missing = (
                "Triton is not installed; pip install triton"
                if need.device == "cuda"
                else f"it needs an NVIDIA or AMD GPU, not {need.device}"
            )
            reasons.insert(0, missing)
        return reasons

    @classmethod
    def preferred_page_size(cls, need: AttentionNeed) -> int:
        device = torch.device(need.device)
        return best_page_size(device, need.head_dim, need.kv_dtype or need.dtype)

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> TritonPlan:
        """K/V before `start` may be read ahead of the kernel that runs before `attend`.

        So a plan without `kv_slots` is made after what is written there: finding them waits for it.
        """
        page, dim = self.pools.page_size, self.need.head_dim
        requests, device = batch.start.shape[0], batch.start.device
        group = self.need.num_heads // self.need.num_kv_heads
        if batch.q_len is not None:
            total, q_len = requests * batch.q_len, batch.q_len
            kv_slots = batch.kv_slots
            if kv_slots is None:
                kv_slots = compute_kv_slots(batch.page_table, batch.start, None, q_len, total, page)
            problem = DecodeProblem(
                batch_size=requests,
                q_rows=group * q_len,
                num_kv_heads=self.need.num_kv_heads,
                head_dim=dim,
                kv_dtype=self.need.kv_dtype or self.need.dtype,
                page_size=page,
                kv_len_ub=batch.kv_len_ub,
            )
            num_splits = choose_num_splits(gpu_of(device), problem)
            tree = None if batch.tree is None else batch.tree.flatten()
            return TritonPlan(batch, kv_slots, num_splits, None, tree)
        assert batch.ragged is not None
        counts = [count for _, count in batch.ragged]
        ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        first = upload(ends, device)
        kv_slots = compute_kv_slots(
            batch.page_table, batch.start, first, max(counts), sum(counts), page
        )
        # The upload in `build_tile_map` lies between `kv_slots` and its first reader (see pdl.py).
        config = prefill_tile_config(gpu_of(device), dim, self.need.dtype)
        tokens_per_tile = max(1, config.block_m // group)
        tile_map = build_tile_map(batch.ragged, tokens_per_tile, partial(upload, device=device))
        return TritonPlan(batch, kv_slots, 1, tile_map)

    def write(self, plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
        assert isinstance(plan, TritonPlan)
        write_kv(k, v, plan.kv_slots, self.pools.k(layer), self.pools.v(layer))

    def rope_write(
        self, plan: Plan, layer: int, qkv: Tensor, norm_rope: QKNormRope, rope: RopeInput
    ) -> Tensor:
        assert isinstance(plan, TritonPlan)
        return qk_norm_rope_write(
            qkv,
            norm_rope.heads,
            norm_rope.norms,
            RopePositions(rope.table, rope.positions),
            plan.kv_slots,
            self.pools.k(layer),
            self.pools.v(layer),
        )

    def rope_write_layers(
        self,
        plan: Plan,
        kv: Tensor,
        norm_rope: KVNormRope,
        rope: RopeInput,
        num_committed: Tensor | None,
    ) -> None:
        assert isinstance(plan, TritonPlan)
        kv_norm_rope_write(
            kv,
            norm_rope.norms,
            RopePositions(rope.table, rope.positions),
            plan.kv_slots,
            self.pools.dense,
            num_committed,
        )

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, TritonPlan)
        batch = plan.batch
        mask = MaskSpec(MASKS[spec.mask.mask], spec.mask.window)
        if plan.tree is not None:
            mask = MaskSpec(TREE, spec.mask.window, plan.tree)
        kv = PagedKV(self.pools.k(layer), self.pools.v(layer), batch.page_table, batch.start)
        if batch.q_len is not None:
            return paged_attention(q, kv, batch.q_len, mask, spec.scale, plan.num_splits)
        assert batch.ragged is not None
        return prefill_attention(q, kv, batch.ragged, plan.tile_map, mask, spec.scale)
