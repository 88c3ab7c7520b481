"""FlashAttention over paged K/V: the backend, and the interface that its libraries are called by.

Lengths stay on the device: nothing is planned on the host, and a captured forward is right for any
lengths. The mask is causal or full, aligned to the end: token i of a request's n new tokens stands
at position kv_len - n + i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionSpec, Buffers, Plan
from forerun.attention.capabilities import AttentionNeed, LayerMask, Mask
from forerun.attention.latent import LatentExpand
from forerun.attention.paged import LibraryBackend, PagedPlan, PagedTokens, WholeContexts

MAX_HEAD_DIM = 256
EXPANDED_DIMS = (192, 128)  # of q and K, and of V: its kernel for expanded MLA
MAX_HEADS_WITH_SINKS = 64


@dataclass(frozen=True)
class FlashMask:
    """`window`: K/V seen (before, after) a token; -1: all."""

    causal: bool
    window: tuple[int, int] = (-1, -1)

    @classmethod
    def of(cls, mask: LayerMask) -> FlashMask:
        """BLOCK sees everything, which includes the whole block."""
        if mask.mask is Mask.SLIDING_BLOCK:
            assert mask.window is not None
            return cls(False, (mask.window - 1, mask.window - 1))
        if mask.mask is Mask.BLOCK:
            assert mask.window is None
            return cls(causal=False)
        return cls(True) if mask.window is None else cls(True, (mask.window - 1, 0))


@dataclass(frozen=True)
class FlashInput:
    """Queries, and the pages of one layer. Scores are scale · (q·k + qv·v).

    Queries are [B, W, Hq, ·], or [T, Hq, ·] where `PagedTokens.cu_q_lens` is set.
    """

    q: Tensor  # [..., Hq, D]
    k: Tensor  # [pages, P, Hkv, D]
    v: Tensor  # [pages, P, Hkv, Dv]
    qv: Tensor | None = None  # [..., Hq, Dv]: MLA, whose V is part of K
    sinks: Tensor | None = None  # [Hq] bfloat16


@dataclass(frozen=True)
class UnpagedInput:
    """Ragged tokens with K and V of their own heads: MLA with expanded K and V, causal."""

    q: Tensor  # [T, H, D]
    k: Tensor  # [S, H, D]
    v: Tensor  # [S, H, Dv]
    cu_q_lens: Tensor  # [B + 1] int32
    cu_kv_lens: Tensor  # [B + 1] int32
    max_q_len: int
    max_kv_len: int


class FlashLibrary(ABC):
    """Kernels of one package."""

    name: ClassVar[str]
    has_sinks: ClassVar[bool] = False

    @abstractmethod
    def schedule(self, x: FlashInput, tokens: PagedTokens, mask: FlashMask) -> Any:
        """How work is split over CTAs, for all layers of a forward: made on the device; None: the
        library has no such thing. `x`: of any of these layers."""

    @abstractmethod
    def attend(
        self, x: FlashInput, tokens: PagedTokens, mask: FlashMask, scale: float, schedule: Any
    ) -> Tensor:
        """[..., Hq, Dv], like q."""

    @abstractmethod
    def attend_unpaged(self, x: UnpagedInput, mask: FlashMask, scale: float) -> Tensor:
        """[T, H, Dv]."""


@dataclass
class FlashPlan(PagedPlan):
    """What layers share, made by the first that needs it: it belongs to this forward's lengths."""

    schedules: dict[FlashMask, Any] = field(default_factory=dict)
    contexts: WholeContexts | None = None


class FlashBackend(LibraryBackend):
    """A backend over a `FlashLibrary`."""

    library: FlashLibrary

    @classmethod
    def why_unfit(cls, need: AttentionNeed) -> list[str]:
        reasons = super().why_unfit(need)
        if need.mla:
            if any(mask.window is not None for mask in need.masks):
                reasons.append("its latent attention has no window")
            if need.sinks:
                reasons.append("its latent attention has no sinks")
        elif need.head_dim % 8 or need.head_dim > MAX_HEAD_DIM:
            reasons.append(f"head dim {need.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}")
        elif need.sinks and need.num_heads > MAX_HEADS_WITH_SINKS:
            reasons.append(f"with attention sinks it has at most {MAX_HEADS_WITH_SINKS} heads")
        return reasons

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> FlashPlan:
        return FlashPlan(PagedTokens.of(batch, self.pools.page_size))

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, FlashPlan)
        k, v = self.pools.k(layer), self.pools.v(layer)
        sinks = None if spec.sinks is None else spec.sinks.to(torch.bfloat16)
        return self._run(plan, spec, FlashInput(_by_request(q, plan), k, v, sinks=sinks))

    def attend_latent(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, FlashPlan)
        sizes = self.latent_sizes(layer)
        latent, rope = self.pools.latent(layer).unsqueeze(2).split_with_sizes(sizes, -1)
        q_latent, q_rope = _by_request(q, plan).split_with_sizes(sizes, -1)
        return self._run(plan, spec, FlashInput(q_rope, rope, latent, q_latent))

    def attend_latent_prefill(
        self,
        plan: Plan,
        batch: AttentionBatch,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        expand: LatentExpand,
    ) -> Tensor:
        assert isinstance(plan, FlashPlan)
        if (expand.dims.qk, expand.dims.v) != EXPANDED_DIMS:
            return super().attend_latent_prefill(plan, batch, layer, spec, q, expand)
        if plan.contexts is None:
            plan.contexts = WholeContexts.of(batch, self.pools.page_size)
        contexts, tokens, mask = plan.contexts, plan.tokens, FlashMask.of(spec.mask)
        assert tokens.cu_q_lens is not None
        rows = self.pools.latent(layer).flatten(0, 1).index_select(0, contexts.kv_slots)
        parts = []
        for heads in expand.head_groups(rows.shape[0], q.element_size()):
            x = UnpagedInput(
                q[:, heads],
                *expand(rows, heads),
                tokens.cu_q_lens,
                contexts.cu_kv_lens,
                tokens.max_q_len,
                contexts.max_kv_len,
            )
            parts.append(self.library.attend_unpaged(x, mask, spec.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _run(self, plan: FlashPlan, spec: AttentionSpec, x: FlashInput) -> Tensor:
        mask, tokens = FlashMask.of(spec.mask), plan.tokens
        if mask not in plan.schedules:
            plan.schedules[mask] = self.library.schedule(x, tokens, mask)
        out = self.library.attend(x, tokens, mask, spec.scale, plan.schedules[mask])
        return out if tokens.cu_q_lens is not None else out.flatten(0, 1)


def _by_request(q: Tensor, plan: FlashPlan) -> Tensor:
    """q [T, Hq, D] as the library takes it."""
    if plan.tokens.cu_q_lens is not None:
        return q
    return q.view(plan.tokens.batch_size, plan.tokens.max_q_len, *q.shape[1:])
