"""K/V written by our own kernels, and a forward's tokens as the kernels of others want them.

Nothing is read on the host but the counts of a prefill, which are exact there.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionNeed,
    AttentionSpec,
    KVNormRope,
    LatentNormRope,
    Plan,
    QKNormRope,
    RopeInput,
    all_alike,
)
from forerun.attention.packages import Package
from forerun.core.errors import ConfigError, InternalError
from forerun.kernels.attention.mla_write import write_latent
from forerun.kernels.attention.paged_kv import compute_kv_slots, write_kv
from forerun.kernels.elementwise.latent_norm_rope import latent_norm_rope_write
from forerun.kernels.elementwise.qk_norm_rope import (
    RopePositions,
    kv_norm_rope_write,
    qk_norm_rope_write,
)
from forerun.kvcache.layouts import LatentKV
from forerun.kvcache.pools import ModelPools
from forerun.platform.device import upload

LATENT_ROW = (512, 64)  # Dl, Dr: what the MLA kernels of libraries are compiled for


def step_kv_slots(batch: AttentionBatch, page_size: int) -> Tensor:
    """Returns the KV slots of a batch with `q_len`, [T] int64."""
    if batch.kv_slots is not None:
        return batch.kv_slots
    assert batch.q_len is not None
    table, start, rows = batch.page_table, batch.start, batch.rows
    first, total = None, start.shape[0] * batch.q_len
    if rows is not None:
        first, total = rows.first, rows.count
    return compute_kv_slots(table, start, first, batch.q_len, total, page_size)


def chunk_kv_slots(batch: AttentionBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """Returns the KV slots of a batch with `ragged`, [T] int64, and where each request's tokens
    begin, [B + 1] int32; both on the device. An upload and a launch.
    """
    assert batch.ragged is not None
    counts, table, start = [count for _, count in batch.ragged], batch.page_table, batch.start
    ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    first = upload(ends, start.device)
    return compute_kv_slots(table, start, first, max(counts), sum(counts), page_size), first


@dataclass(frozen=True)
class PagedTokens:
    """The tokens of one forward; on the device, but for `max_q_len`."""

    kv_slots: Tensor  # [T] int64
    kv_lens: Tensor  # [B] int32: K/V of each request, the forward's own tokens included
    # [B, n] int32, no wider than the longest context: libraries take the longest from its width,
    # and choose by it into how many splits a context is cut.
    page_table: Tensor
    max_q_len: int  # tokens of the longest request
    cu_q_lens: Tensor | None = None  # [B + 1] int32, ragged; None: `max_q_len` of every request

    @property
    def batch_size(self) -> int:
        return self.kv_lens.shape[0]

    @classmethod
    def of(cls, batch: AttentionBatch, page_size: int) -> PagedTokens:
        """Launches one or two small kernels; an upload more in a prefill."""
        start, table = batch.start, batch.page_table
        if batch.q_len is not None:
            kv_slots = step_kv_slots(batch, page_size)
            return cls(kv_slots, start + batch.q_len, table, batch.q_len)
        assert batch.ragged is not None
        kv_slots, first = chunk_kv_slots(batch, page_size)
        # These launches lie between `kv_slots` and its first reader (see pdl.py).
        kv_lens, used = start + first.diff(), table[:, : -(-batch.kv_len_ub // page_size)]
        return cls(kv_slots, kv_lens, used, max(count for _, count in batch.ragged), first)


@dataclass(frozen=True)
class WholeContexts:
    """All K/V of the requests of a prefill, one after another: S in all."""

    kv_slots: Tensor  # [S] int64
    cu_kv_lens: Tensor  # [B + 1] int32
    max_kv_len: int

    @classmethod
    def of(cls, batch: AttentionBatch, page_size: int) -> WholeContexts:
        assert batch.ragged is not None
        lengths, table = [start + count for start, count in batch.ragged], batch.page_table
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        cu_kv_lens, begin = upload(ends, table.device), torch.zeros_like(batch.start)
        kv_slots = compute_kv_slots(table, begin, cu_kv_lens, max(lengths), sum(lengths), page_size)
        return cls(kv_slots, cu_kv_lens, max(lengths))


class SlotPlan(Plan):
    """Knows where the tokens of its forward are stored."""

    kv_slots: Tensor  # [T] int64


@dataclass
class PagedPlan(SlotPlan):
    """The plan of a library's kernels."""

    tokens: PagedTokens

    def __post_init__(self) -> None:
        self.kv_slots = self.tokens.kv_slots


class PagedBackend(AttentionBackend):
    """Writes to the pools with our kernels; its plans are `SlotPlan`s."""

    def write(self, plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
        assert isinstance(plan, SlotPlan)
        write_kv(k, v, plan.kv_slots, self.pools.k(layer), self.pools.v(layer))

    def rope_write(
        self, plan: Plan, layer: int, qkv: Tensor, norm_rope: QKNormRope, rope: RopeInput
    ) -> Tensor:
        assert isinstance(plan, SlotPlan)
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
        ropes: Sequence[RopeInput],
        num_committed: Tensor | None,
    ) -> None:
        assert isinstance(plan, SlotPlan)
        if not all_alike(ropes):
            super().rope_write_layers(plan, kv, norm_rope, ropes, num_committed)
            return
        kv_norm_rope_write(
            kv,
            norm_rope.norms,
            RopePositions(ropes[0].table, ropes[0].positions),
            plan.kv_slots,
            self.pools.dense,
            num_committed,
        )

    def latent_sizes(self, layer: int) -> list[int]:
        """Returns [Dl, Dr] of the rows of a latent layer."""
        kind = self.pools.layout.layers[layer]
        assert isinstance(kind, LatentKV)
        return [kind.latent_dim, kind.rope_dim]

    def write_latent(self, plan: Plan, layer: int, latent: Tensor) -> None:
        assert isinstance(plan, SlotPlan)
        write_latent(latent, plan.kv_slots, self.pools.latent(layer))

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
        assert isinstance(plan, SlotPlan)
        latent_norm_rope_write(
            kv_a,
            q_rope,
            norm_rope.norm,
            RopePositions(rope.table, rope.positions),
            plan.kv_slots,
            self.pools.latent(layer),
            q_out,
        )


class LibraryBackend(PagedBackend):
    """Attends with a library, which is loaded when the backend is created.

    Its kernels read K/V of q's dtype.
    """

    package: ClassVar[Package]
    module: ClassVar[str]  # to import

    @classmethod
    def why_unfit(cls, need: AttentionNeed) -> list[str]:
        reasons = super().why_unfit(need)
        if need.kv_dtype not in (None, need.dtype):
            reasons.append(f"it reads K/V of q's dtype ({need.dtype}), not {need.kv_dtype}")
        return reasons

    @classmethod
    def why_missing(cls) -> list[str]:
        return cls.package.why_not()

    @classmethod
    def load(cls, need: AttentionNeed) -> Any:
        """Returns the library; that of `module`, if a backend does not say otherwise.

        Raises:
            ImportError, OSError, AttributeError: it does not fit this Python, torch or GPU, or
                is another version, without the functions that are called.
        """
        return importlib.import_module(cls.module)

    @classmethod
    def why_broken(cls, need: AttentionNeed) -> list[str]:
        try:
            cls.load(need)
        except (ImportError, OSError, AttributeError) as error:
            said = str(error).partition("\n")[0]
            return [f"its library cannot be loaded with torch {torch.__version__}: {said}"]
        return []

    def __init__(self, need: AttentionNeed, pools: ModelPools) -> None:
        super().__init__(need, pools)
        if reasons := self.why_broken(need):
            raise ConfigError(
                f"attention_backend {self.name}: {reasons[0]}. Install a build for this torch, or"
                " choose another backend."
            )
        self.library = self.load(need)


class LatentLibraryBackend(LibraryBackend):
    """A library that has latent (MLA) attention only."""

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        raise InternalError(f"{self.name} has latent (MLA) attention only.")
