"""The attention interface: what a model needs, what a backend can do, one call a layer.

Shapes: B requests, W query rows a request (fixed width) or ragged rows (prefill chunks),
T = all rows, Hq / Hkv query / key-value heads, D head dim, P page size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from forerun.kernels.elementwise.qk_norm_rope import HeadNorms
from forerun.kvcache.pools import ModelPools


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
    kv_dtype: torch.dtype | None = None  # of stored K/V; None: `dtype`


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
    # [B, W] int64, device: bit j of row i says whether it sees row j. Causal layers then see the
    # context and these rows, and not all before them.
    tree: Tensor | None = None
    rows: Tensor | None = None  # [B * W] int64, device: their pool rows, where these are known
    ragged: tuple[tuple[int, int], ...] | None = None  # host: (start, rows) a request, exact


class RopeInput(Protocol):
    """Where the rows of a forward stand, and the table that turns them there."""

    @property
    def table(self) -> Tensor:
        """[P, 2, 1, D]: cos and signed sin."""

    @property
    def positions(self) -> Tensor:
        """[T] integers."""

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Of the rows, [T, 1, D] each."""


class QKNormRope(ABC):
    """What lies between a product and the pool: norms over heads, and rope.

    Its values are for backends that do it in a kernel of their own; `split` is the same in plain
    PyTorch. Of one layer, the product is [T, (Hq + 2 Hkv) · D]: q heads, k heads, v heads.
    """

    heads: int  # Hq
    norms: HeadNorms | None

    @abstractmethod
    def split(self, product: Tensor, rope: RopeInput) -> tuple[Tensor, Tensor, Tensor]:
        """(q [T, Hq, D], k, v [T, Hkv, D]), normed and rotated."""


class KVNormRope(ABC):
    """The same for K/V of many layers from one product [T, 2 · L · Hkv · D]: all k, then all v."""

    norms: HeadNorms | None  # k: [L, D]

    @abstractmethod
    def split(self, product: Tensor, rope: RopeInput) -> list[tuple[Tensor, Tensor]]:
        """(k, v) [T, Hkv, D] of every layer."""


class Plan(ABC):  # noqa: B024 - each backend has its own
    """What a backend prepared for one forward."""


class AttentionBackend(ABC):
    """Writes K/V to the pools and attends. One instance serves one model and its pools.

    The pool's dtype may be another than the model's: K/V is converted when it is written and when
    it is read, never scaled.
    """

    name: ClassVar[str]

    def __init__(self, need: AttentionNeed, pools: ModelPools) -> None:
        self.need = need
        self.pools = pools

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

    def rope_write(
        self, plan: Plan, layer: int, qkv: Tensor, norm_rope: QKNormRope, rope: RopeInput
    ) -> Tensor:
        """Norms and rotates q and k of `qkv`, stores k and v; returns q [T, Hq, D]."""
        q, k, v = norm_rope.split(qkv, rope)
        self.write(plan, layer, k, v)
        return q

    def rope_write_layers(
        self,
        plan: Plan,
        kv: Tensor,
        norm_rope: KVNormRope,
        rope: RopeInput,
        new: Tensor | None,
    ) -> None:
        """Norms and rotates k of every layer, stores k and v.

        `new` [B] int32: how many of each request's rows will be read again; a backend may leave
        out the rest. None: all.
        """
        for layer, (k, v) in enumerate(norm_rope.split(kv, rope)):
            self.write(plan, layer, k, v)

    @abstractmethod
    def attend(self, plan: Plan, layer: int, mask: LayerMask, scale: float, q: Tensor) -> Tensor:
        """q [T, Hq, D] against the pool; returns [T, Hq, D]."""


@dataclass(frozen=True)
class AttentionContext:
    """What a model's forward is handed: the backend and its plan for these rows."""

    backend: AttentionBackend
    plan: Plan

    def run(
        self,
        layer: int,
        mask: LayerMask,
        scale: float,
        qkv: Tensor,
        norm_rope: QKNormRope,
        rope: RopeInput,
    ) -> Tensor:
        """From a layer's product to what its heads gathered, [T, Hq, D]."""
        q = self.backend.rope_write(self.plan, layer, qkv, norm_rope, rope)
        return self.backend.attend(self.plan, layer, mask, scale, q)

    def write_layers(
        self,
        kv: Tensor,
        norm_rope: KVNormRope,
        rope: RopeInput,
        new: Tensor | None = None,
    ) -> None:
        """K/V of every layer at once; see `AttentionBackend.rope_write_layers`."""
        self.backend.rope_write_layers(self.plan, kv, norm_rope, rope, new)
