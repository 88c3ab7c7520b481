"""The attention interface: what a model needs, what a backend can do, one call a layer.

Shapes: B requests, W query rows a request (fixed width) or ragged rows (prefill chunks),
T = all rows, Hq / Hkv query / key-value heads, D head dim, P page size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from forerun.kvcache.pools import KVPool


class Mask(Enum):
    """Which K/V rows a query row sees, beyond the context that is committed."""

    CAUSAL = "causal"  # row at position p sees positions <= p
    BLOCK = "block"  # every row of a request's block sees the context and the whole block
    CUSTOM = "custom"  # a tree: the context and its ancestors


@dataclass(frozen=True)
class LayerMask:
    """The mask of one layer.

    `window` counts positions. CAUSAL: a row at p sees (p - window, p], so the window holds the
    row itself, as in Hugging Face. BLOCK: the context is cut to the `window` positions before the
    block; the block itself is always seen whole.
    """

    mask: Mask = Mask.CAUSAL
    window: int | None = None


@dataclass(frozen=True)
class AttentionNeed:
    """All a backend must know to say whether it can serve a model; values only."""

    device: str  # "cpu", "cuda"
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    page_size: int
    masks: frozenset[LayerMask]
    graph: bool = False  # will be captured into a device graph
    mla: bool = False


@dataclass(frozen=True)
class AttentionBatch:
    """The rows of one forward, before any layer.

    Exactly one of `width` and `ragged` is set. Lengths on the device are the truth; what the host
    says (`kv_len_ub`, `ragged`) bounds shapes only.
    """

    page_table: Tensor  # [B, pages] int32, device: page ids of each request
    start: Tensor  # [B] int32, device: position of the first query row
    kv_len_ub: int  # host: upper bound of start + rows over the batch
    width: int | None = None  # W, the same for every request
    ragged: tuple[tuple[int, int], ...] | None = None  # host: (start, rows) a request, exact


class Plan(ABC):  # noqa: B024 - each backend has its own
    """What a backend prepared for one forward."""


class AttentionBackend(ABC):
    """Writes K/V to the pool and attends. One instance serves one model and its pool."""

    name: ClassVar[str]

    def __init__(self, need: AttentionNeed, pool: KVPool) -> None:
        self.need = need
        self.pool = pool

    @classmethod
    @abstractmethod
    def why_not(cls, need: AttentionNeed) -> list[str]:
        """Every reason why this backend cannot serve the need; empty if it can."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Plan:
        """Once a forward, shared by its layers."""

    @abstractmethod
    def write(self, plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, Hkv, D] of the batch's rows in the pool."""

    @abstractmethod
    def attend(self, plan: Plan, layer: int, mask: LayerMask, scale: float, q: Tensor) -> Tensor:
        """q [T, Hq, D] against the pool; returns [T, Hq, D]."""

    def run(
        self,
        plan: Plan,
        layer: int,
        mask: LayerMask,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Write, then attend. A backend that can fuse the two overrides this."""
        self.write(plan, layer, k, v)
        return self.attend(plan, layer, mask, scale, q)


@dataclass(frozen=True)
class AttentionContext:
    """What a model's forward is handed: the backend and its plan for these rows."""

    backend: AttentionBackend
    plan: Plan

    def run(
        self, layer: int, mask: LayerMask, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        return self.backend.run(self.plan, layer, mask, scale, q, k, v)
