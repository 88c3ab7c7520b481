"""Attention on a CPU by our own kernels in C++ (`kernels/cpu`), for every phase.

A token's result does not depend on the other tokens of a forward, so prompts, decode and verify
steps agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBatch,
    AttentionNeed,
    AttentionSpec,
    Buffers,
    KVNormRope,
    Plan,
    QKNormRope,
    RopeInput,
    all_alike,
)
from forerun.attention.capabilities import Capabilities, Mask
from forerun.attention.paged import PagedBackend, SlotPlan, chunk_kv_slots, step_kv_slots
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.cpu import library
from forerun.kernels.cpu.attention import (
    BLOCK,
    CAUSAL,
    MAX_GROUP,
    MAX_HEAD_DIM,
    SLIDING_BLOCK,
    QueryTokens,
    Scores,
    kv_norm_rope_write,
    paged_attention,
    qk_norm_rope_write,
)
from forerun.kernels.elementwise.qk_norm_rope import RopePositions
from forerun.kvcache.layouts import LatentKV

DTYPES = (torch.float32, torch.bfloat16)
KINDS = {Mask.CAUSAL: CAUSAL, Mask.BLOCK: BLOCK, Mask.SLIDING_BLOCK: SLIDING_BLOCK}


@dataclass
class CpuPlan(SlotPlan):
    batch: AttentionBatch
    kv_slots: Tensor  # [T] int64
    tokens: QueryTokens


class CpuAttention(PagedBackend):
    name = "cpu"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        windows=frozenset({Mask.CAUSAL, Mask.BLOCK, Mask.SLIDING_BLOCK}),
        head_dims=range(2, MAX_HEAD_DIM + 1, 2),
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        cpu_graph=True,
        mla=True,
        mixed_layouts=True,
        sinks=True,
        logit_softcap=True,
        fixed_order=True,
        ragged_steps=True,
    )

    @classmethod
    def why_not(cls, need: AttentionNeed) -> list[str]:
        """Compiles the kernels only where they could serve."""
        return cls.why_unfit(need) or cls.why_missing()

    @classmethod
    def why_missing(cls) -> list[str]:
        reason = library.why_missing()
        return [] if reason is None else [reason]

    @classmethod
    def why_unfit(cls, need: AttentionNeed) -> list[str]:
        reasons = super().why_unfit(need)
        group = need.num_heads // need.num_kv_heads
        if group > MAX_GROUP and need.dense:
            reasons.append(f"{group} query heads share a K/V head; it takes up to {MAX_GROUP}")
        return reasons

    @property
    def absorbed_speedup(self) -> float:
        """Prompts never expand K and V: a token's bits would not be those of a decode step."""
        return math.inf

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> CpuPlan:
        page = self.pools.page_size
        if batch.q_len is not None:
            first = None if batch.rows is None else batch.rows.first.long()
            tokens = QueryTokens(batch.q_len, first, batch.tree)
            return CpuPlan(batch, step_kv_slots(batch, page), tokens)
        kv_slots, first = chunk_kv_slots(batch, page)
        return CpuPlan(batch, kv_slots, QueryTokens(first=first.long()))

    def rope_write(
        self, plan: Plan, layer: int, qkv: Tensor, norm_rope: QKNormRope, rope: RopeInput
    ) -> Tensor:
        assert isinstance(plan, CpuPlan)
        norms = norm_rope.norms
        if norms is not None and norms.q.dtype != qkv.dtype:  # Gemma's in bfloat16
            q, k, v = norm_rope.split(qkv, rope)
            self.write(plan, layer, k, v)
            return q
        return qk_norm_rope_write(
            qkv,
            norm_rope.heads,
            norms,
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
        ropes: Sequence[RopeInput],
        num_committed: Tensor | None,
    ) -> None:
        assert isinstance(plan, CpuPlan)
        if not all_alike(ropes):
            super().rope_write_layers(plan, kv, norm_rope, ropes, num_committed)
            return
        positions = RopePositions(ropes[0].table, ropes[0].positions)
        kv_norm_rope_write(kv, norm_rope.norms, positions, plan.kv_slots, self.pools.dense)

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, CpuPlan)
        batch, tokens, mask = plan.batch, plan.tokens, spec.mask
        kv = PagedKV(self.pools.k(layer), self.pools.v(layer), batch.page_table, batch.start)
        if mask.mask is not Mask.CAUSAL and tokens.tree is not None:
            tokens = replace(tokens, tree=None)
        kind = KINDS[mask.mask]
        scores = Scores(spec.scale, kind, mask.window, spec.logit_softcap, spec.sinks)
        return paged_attention(q, kv, tokens, scores)

    def attend_latent(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        """Rows are K and V; of the output, what is not V is dropped. Heads go in groups."""
        assert isinstance(plan, CpuPlan)
        batch, rows = plan.batch, self.pools.latent(layer).unsqueeze(2)  # one K/V head
        kv = PagedKV(rows, rows, batch.page_table, batch.start)
        scores = Scores(spec.scale, window=spec.mask.window)
        parts = [paged_attention(each, kv, plan.tokens, scores) for each in q.split(MAX_GROUP, 1)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        kind = self.pools.layout.layers[layer]
        assert isinstance(kind, LatentKV)
        return out[..., : kind.latent_dim]
