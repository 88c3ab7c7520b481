"""The attention interface: what runs once per captured shape, before each run, and in the forward.

    allocate(shape)        once per decode shape: buffers that a captured forward reads
    prepare(buffers, host) on the host, before every run or replay of that shape
    plan(batch, buffers)   in the forward, on the device, shared by its layers
    write, attend          in the forward, per layer

Backends that read lengths on the device need only `plan`, `write` and `attend`.

Shapes: B requests; q_len tokens per request (decode) or ragged chunks (prefill); T tokens in all;
Hq / Hkv query / K/V heads; D head dim; Dl / Dr latent and rope part of an MLA row, Dn + Dr and Dv
dims of the K and V heads that it expands to; P page size.
A KV slot is a token's place in the pools: page id · P + offset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from forerun.attention.capabilities import (
    AttentionNeed,
    Capabilities,
    HostLengths,
    LayerMask,
    Mask,
    Phase,
)
from forerun.attention.latent import LatentExpand, LatentProjection, attend_expanded_ref
from forerun.attention.recurrent import RecurrentContext
from forerun.core.errors import InternalError
from forerun.kernels.elementwise.latent_norm_rope import LatentNorm
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms
from forerun.kernels.linear_attention.chunks import PromptChunks
from forerun.kernels.speculation.ragged import RaggedRows
from forerun.kvcache.pages import NULL_PAGE
from forerun.kvcache.pools import ModelPools
from forerun.platform.device import upload

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionContext",
    "AttentionNeed",
    "AttentionSpec",
    "Buffers",
    "Capabilities",
    "DecodeShape",
    "HostBatch",
    "HostLengths",
    "KVNormRope",
    "LatentExpand",
    "LatentNormRope",
    "LatentProjection",
    "LayerMask",
    "Mask",
    "Phase",
    "Plan",
    "QKNormRope",
    "RopeInput",
]

DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What one layer does to its scores."""

    mask: LayerMask
    scale: float  # scores are scale · q·k
    logit_softcap: float | None = None  # c: scores become c · tanh(score / c), before the mask
    # [Hq] float32: per head, a logit without a value in the softmax (gpt-oss).
    sinks: Tensor | None = None


@dataclass(frozen=True)
class AttentionBatch:
    """The tokens of one forward, before any layer.

    Exactly one of `q_len` and `ragged` is set. Lengths on the device are the truth; what the host
    says (`kv_len_ub`, `ragged`) bounds shapes only.
    """

    page_table: Tensor  # [B, pages] int32, device: page ids of each request
    start: Tensor  # [B] int32, device: position of the first token
    kv_len_ub: int  # host: upper bound of start + tokens over the batch
    q_len: int | None = None  # tokens of every request, or at most (`rows`)
    # [B, q_len, words] int64, device: bit j of token i says whether it sees token j. Causal layers
    # then see the context and these tokens, and not all before them.
    tree: Tensor | None = None
    # [B, q_len] int64, device: with `tree`, each token's parent, -1 for the root; for recurrent
    # layers.
    parents: Tensor | None = None
    kv_slots: Tensor | None = None  # [T] int64, device: where these are known already
    # device, with `q_len`: the tokens are packed row by row, and `q_len` is the most that a request
    # has. For backends that declare `ragged_steps`.
    rows: RaggedRows | None = None
    ragged: tuple[tuple[int, int], ...] | None = None  # host: (start, tokens) per request, exact
    slots: Tensor | None = None  # [B] int64, device: request slots, for recurrent layers
    # host, prefill: page ids of each request, where a backend declares `host_page_table`
    host_pages: Sequence[Sequence[int]] | None = None

    def decode_shape(self, kv_len_ub: int) -> DecodeShape:
        """The shape of a batch with `q_len`; `kv_len_ub`: the most this shape may ever reach."""
        assert self.q_len is not None
        tree = self.tree is not None
        return DecodeShape(self.start.shape[0], self.q_len, kv_len_ub, tree, self.start.device)


@dataclass(frozen=True)
class DecodeShape:
    """A decode forward that may be captured once and run often."""

    batch_size: int
    q_len: int
    kv_len_ub: int  # the longest context, its own tokens included, that it may meet
    tree: bool  # a CUSTOM mask comes with the batch
    device: torch.device


@dataclass(frozen=True)
class HostBatch:
    """What the host knows of a decode batch before it runs, per request."""

    # Committed tokens in front of the step's own; exact, or an upper bound (`HostLengths`).
    kv_lens: Sequence[int]
    pages: Sequence[Sequence[int]] | None = None  # page ids, where a backend asks for them
    window_pages: Sequence[Sequence[int]] | None = None  # the same for windowed pools

    def padded(self, batch_size: int) -> HostBatch:
        """Returns it with padding slots at the end: no context, the null page."""
        more = batch_size - len(self.kv_lens)
        pages, window_pages = (
            None if each is None else [*each, *[[NULL_PAGE]] * more]
            for each in (self.pages, self.window_pages)
        )
        return HostBatch([*self.kv_lens, *[0] * more], pages, window_pages)

    def for_pools(self, pools: ModelPools) -> HostBatch:
        """Returns it with the page ids of these pools in `pages`."""
        return replace(self, pages=self.window_pages) if pools.windowed else self

    def shifted(self, offset: int) -> HostBatch:
        """The batch of tokens that begin `offset` later (drafts of a chain: a forward each)."""
        if not offset:
            return self
        return replace(self, kv_lens=[max(0, length + offset) for length in self.kv_lens])

    @classmethod
    def padding(cls, batch_size: int) -> HostBatch:
        """Padding slots alone: profiling, warm-up, capture."""
        return cls([], [], []).padded(batch_size)


class Buffers(ABC):  # noqa: B024 - each backend has its own
    """What a backend keeps for one decode shape: tensors at fixed addresses, host workspaces."""


class Plan(ABC):  # noqa: B024 - each backend has its own
    """What a backend's kernels need in one forward, for all layers."""


class RopeInput(Protocol):
    """Positions of the tokens of a forward, and the rotary tables. Hashed by identity."""

    @property
    def table(self) -> Tensor:
        """[P, 2, 1, D]: cos and signed sin."""

    @property
    def positions(self) -> Tensor:
        """[T] integers."""

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens, [T, 1, D] each."""

    def first(self, count: int) -> RopeInput:
        """Returns the input of the first `count` tokens."""


def all_alike(ropes: Sequence[RopeInput]) -> bool:
    """Whether layers with these have the same tables, as kernels over many layers need."""
    return all(rope is ropes[0] for rope in ropes)


class QKNormRope(ABC):
    """What lies between the QKV GEMM and the pool: norms over heads, and RoPE.

    Its values are for backends that do it in a kernel of their own; `split` is the same in plain
    PyTorch. The GEMM's output for one layer is [T, (Hq + 2 Hkv) · D]: q heads, k heads, v heads.
    """

    heads: int  # Hq
    dim: int  # D
    norms: HeadNorms | None

    @abstractmethod
    def split(self, qkv: Tensor, rope: RopeInput) -> tuple[Tensor, Tensor, Tensor]:
        """(q [T, Hq, D], k, v [T, Hkv, D]), normed and rotated."""


class LatentNormRope(ABC):
    """What MLA does between projections and attention: norm and RoPE of latent rows, RoPE of q."""

    norm: LatentNorm

    @abstractmethod
    def split(self, kv_a: Tensor, q_rope: Tensor, rope: RopeInput) -> tuple[Tensor, Tensor]:
        """(latent rows [T, Dl + Dr], q_rope [T, Hq, Dr]), normed and rotated."""


class KVNormRope(ABC):
    """The same for K/V of many layers from one GEMM [T, 2 · L · Hkv · D]: all k, then all v."""

    norms: HeadNorms | None  # k: [L, D]

    @abstractmethod
    def split(self, kv: Tensor, ropes: Sequence[RopeInput]) -> list[tuple[Tensor, Tensor]]:
        """(k, v) [T, Hkv, D] of every layer."""


class AttentionBackend(ABC):
    """Writes K/V to the pools and attends. One instance serves one model and its pools.

    The pools' dtype may be another than the model's: K/V is converted when it is written and when
    it is read, never scaled.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self, need: AttentionNeed, pools: ModelPools) -> None:
        self.need = need
        self.pools = pools

    @property
    def absorbed_speedup(self) -> float:
        """FLOP/s of `attend_latent` in prefill, relative to `attend_latent_prefill`."""
        return 1.0

    @classmethod
    def why_not(cls, need: AttentionNeed) -> list[str]:
        """Every reason why this backend cannot serve the need here; empty if it can."""
        return [*cls.why_missing(), *cls.why_unfit(need)]

    @classmethod
    def why_missing(cls) -> list[str]:
        """The package that this machine lacks, and how to install it; empty: it lacks nothing."""
        return []

    @classmethod
    def why_unfit(cls, need: AttentionNeed) -> list[str]:
        """Every reason why it cannot serve the need on any machine with all packages.

        Override to add what `capabilities` cannot say, and keep these.
        """
        return cls.capabilities.refusals(need)

    @classmethod
    def why_broken(cls, need: AttentionNeed) -> list[str]:
        """Why an installed package cannot be loaded; empty: it can, or there is none.

        Loads it, so it is asked only before this backend becomes a default.
        """
        return []

    @classmethod
    def phases_on(cls, arch: str | None) -> frozenset[Phase]:
        """The phases that it is made for on a GPU; override where that depends on the GPU."""
        return cls.capabilities.phases

    @classmethod
    def preferred_page_size(cls, need: AttentionNeed) -> int:
        """The page size that is fastest for this need; one of its `page_sizes`."""
        sizes = cls.capabilities.page_sizes
        return DEFAULT_PAGE_SIZE if sizes is None or DEFAULT_PAGE_SIZE in sizes else max(sizes)

    def allocate(self, shape: DecodeShape) -> Buffers | None:
        """Once per decode shape, before it is captured. Only for backends that plan on the host."""
        return None

    def prepare(self, buffers: Buffers, host: HostBatch) -> None:
        """Plans on the host, before every run or replay of the shape that `buffers` were made for.

        Writes buffers in place, on the current stream, without waiting for the device.
        """
        raise InternalError(f"{self.name} plans nothing on the host.")

    @abstractmethod
    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> Plan:
        """Plans a forward, once for its layers. Reads device tensors only if `q_len` is set.

        `buffers`: of the batch's shape, prepared; None in prefill, and for backends that allocate
        none.
        """

    @abstractmethod
    def write(self, plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores k, v [T, Hkv, D] of the batch's tokens in the pools."""

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
        ropes: Sequence[RopeInput],
        num_committed: Tensor | None,
    ) -> None:
        """Norms and rotates k of every layer, by its own of `ropes`; stores k and v.

        `num_committed` [B] int32: how many of each request's tokens will be read again; a backend
        may leave out the rest. None: all.
        """
        for layer, (k, v) in enumerate(norm_rope.split(kv, ropes)):
            self.write(plan, layer, k, v)

    @abstractmethod
    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        """q [T, Hq, D] against the K/V of `layer`; returns [T, Hq, D]."""

    def write_latent(self, plan: Plan, layer: int, latent: Tensor) -> None:
        """Stores latent [T, Dl + Dr] of the batch's tokens. Needs `Capabilities.mla`."""
        raise InternalError(f"{self.name} has no latent (MLA) attention.")

    def rope_write_latent(
        self,
        plan: Plan,
        layer: int,
        kv_a: Tensor,
        q_rope: Tensor,
        norm_rope: LatentNormRope,
        rope: RopeInput,
        q_out: Tensor,
    ) -> None:
        """Norms and rotates kv_a [T, Dl + Dr] and stores it; rotates q_rope into q_out.

        q_rope and q_out [T, Hq, Dr] have any strides and may be the same.
        """
        rows, q = norm_rope.split(kv_a, q_rope, rope)
        self.write_latent(plan, layer, rows)
        q_out.copy_(q)

    def attend_latent(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        """MLA with absorbed projections: q [T, Hq, Dl + Dr], returns [T, Hq, Dl].

        K is the stored row, V its first Dl values, the same for all heads. Needs
        `Capabilities.mla`.
        """
        raise InternalError(f"{self.name} has no latent (MLA) attention.")

    def attend_latent_prefill(
        self,
        plan: Plan,
        batch: AttentionBatch,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        expand: LatentExpand,
    ) -> Tensor:
        """MLA of prefill chunks with K and V per head: q [T, Hq, Dn + Dr], returns [T, Hq, Dv].

        Called for batches with `ragged` only, after `write_latent` of the same tokens, and only
        where expanding takes less time than the absorbed form
        (`LatentDims.expanding_is_cheaper`, host values, `absorbed_speedup`); else `attend_latent`
        is called, so a backend with `mla` serves both. The mask is causal, with or without a
        window; no sinks, no soft-cap.

        This default gathers the rows of each request from `pools.latent(layer)`, expands them by
        groups of heads (`LatentExpand.head_groups` bounds the memory) and calls PyTorch's
        attention. A backend may override it whole and keep any part of that:

        - what depends on the batch alone (cumulative lengths, page ids of the gather) belongs into
          `plan`, made once for all layers; `plan` does not know yet which form a layer takes;
        - rows of several requests may be gathered and expanded together: `expand` takes any rows,
          k and v come back as [S, h, Dn + Dr] and [S, h, Dv] with a contiguous last dimension, for
          kernels that take unpaged K and V of unequal head dims, causal and aligned to the end of
          each request;
        - a context may be expanded in parts and merged by log-sum-exp instead of by groups of
          heads.

        Rows in the pool are of the pool's dtype; `expand` wants the dtype of `q`. A backend whose
        kernel does not take `expand.dims` calls `super()`.
        """
        assert batch.ragged is not None
        return attend_expanded_ref(
            q,
            self.pools.latent(layer),
            batch.page_table,
            batch.ragged,
            expand,
            spec.scale,
            spec.mask.window,
        )


@dataclass(frozen=True)
class AttentionContext:
    """What a model's forward gets: the backend, its plan for these tokens, and recurrent state."""

    backend: AttentionBackend
    plan: Plan
    batch: AttentionBatch

    def run(
        self, layer: int, spec: AttentionSpec, qkv: Tensor, norm_rope: QKNormRope, rope: RopeInput
    ) -> Tensor:
        """Computes the output of a layer's heads, [T, Hq, D], from its QKV GEMM."""
        q = self.backend.rope_write(self.plan, layer, qkv, norm_rope, rope)
        return self.backend.attend(self.plan, layer, spec, q)

    def run_shared(self, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        """Attends in a layer that reads another one's K/V: q [T, Hq, D], normed and rotated."""
        return self.backend.attend(self.plan, layer, spec, q)

    def run_latent(
        self,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        kv_a: Tensor,
        norm_rope: LatentNormRope,
        rope: RopeInput,
        up: LatentProjection,
    ) -> Tensor:
        """The same of an MLA layer: q [T, Hq, Dn + Dr] and kv_a [T, Dl + Dr] -> [T, Hq, Dv].

        Prefill chunks take the form that takes less time, all other tokens the absorbed one. May
        overwrite q.
        """
        backend, plan, dims, chunks = self.backend, self.plan, up.dims, self.batch.ragged
        q_nope, q_rope = q.split_with_sizes((dims.nope, dims.rope), 2)
        if chunks is not None and dims.expanding_is_cheaper(chunks, backend.absorbed_speedup):
            backend.rope_write_latent(plan, layer, kv_a, q_rope, norm_rope, rope, q_rope)
            q = q.contiguous()
            return backend.attend_latent_prefill(plan, self.batch, layer, spec, q, up)
        absorbed = q.new_empty(len(q), up.num_heads, dims.latent + dims.rope)
        up.absorb(q_nope, absorbed[..., : dims.latent])
        rotated = absorbed[..., dims.latent :]
        backend.rope_write_latent(plan, layer, kv_a, q_rope, norm_rope, rope, rotated)
        return up.project_v(self.attend_latent(layer, spec, absorbed))

    def attend_latent(self, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        """Attends with absorbed projections over stored rows: q [T, Hq, Dl + Dr] -> [T, Hq, Dl]."""
        return self.backend.attend_latent(self.plan, layer, spec, q)

    def recurrent(self, layer: int) -> RecurrentContext:
        """The state of a recurrent layer, for these tokens."""
        batch = self.batch
        assert batch.slots is not None
        prompts = None if batch.ragged is None else self._prompts
        state = self.backend.pools.state(layer)
        return RecurrentContext(batch.slots, batch.q_len, prompts, state, batch.parents, batch.rows)

    @cached_property
    def _prompts(self) -> PromptChunks:
        """Uploaded by the first recurrent layer, for all."""
        assert self.batch.ragged is not None
        send = partial(upload, device=self.batch.start.device)
        return PromptChunks.of([count for _, count in self.batch.ragged], send)

    def write_layers(
        self,
        kv: Tensor,
        norm_rope: KVNormRope,
        ropes: Sequence[RopeInput],
        num_committed: Tensor | None = None,
    ) -> None:
        """K/V of every layer at once; see `AttentionBackend.rope_write_layers`.

        Of packed tokens all K/V is written: kernels find a token's request by its index.
        """
        if self.batch.rows is not None:
            num_committed = None
        self.backend.rope_write_layers(self.plan, kv, norm_rope, ropes, num_committed)
