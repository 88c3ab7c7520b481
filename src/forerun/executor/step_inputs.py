"""What goes into and comes out of a device step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend, AttentionBatch, AttentionContext
from forerun.attention.model_attention import ModelAttention, StepBuffers
from forerun.core.plan import PrefillChunk
from forerun.sampling.sampler import SamplingFlags
from forerun.speculative.base import ObserveInput


@dataclass(frozen=True)
class StepShape:
    """What a decode step is specialised to."""

    num_verify_tokens: int  # W
    kv_len_ub: int  # upper bound of committed lengths plus the KV slots a step may write
    flags: SamplingFlags  # which sampling operations run


@dataclass(frozen=True)
class StepTokens:
    """T tokens of one forward, from which each pool's attention is planned."""

    slots: Tensor  # [B] int64
    page_table: Tensor  # [B, pages] int32
    start: Tensor  # [B] int32
    positions: Tensor  # [T] int32
    kv_len_ub: int
    q_len: int | None = None  # tokens of every request; None: `ragged`
    ragged: tuple[tuple[int, int], ...] | None = None
    host_pages: Sequence[Sequence[int]] | None = None  # of a prefill

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Tokens of each request."""
        if self.ragged is not None:
            return tuple(count for _, count in self.ragged)
        assert self.q_len is not None
        return (self.q_len,) * self.slots.shape[0]

    def attention(self, q_len: int | None, offset: int = 0) -> AttentionBatch:
        """Over `q_len` tokens per request, from `offset` after its start on; None: as `ragged`."""
        return AttentionBatch(
            self.page_table,
            self.start + offset if offset else self.start,
            self.kv_len_ub,
            q_len=q_len,
            ragged=self.ragged,
            slots=self.slots,
            host_pages=self.host_pages,
        )


@dataclass(frozen=True, kw_only=True)
class DecodeTokens(StepTokens):
    """W tokens per request."""

    q_len: int  # W
    kv_slots: Tensor  # [B * W] int64
    last_token: Tensor  # [B] int64
    next_positions: Tensor  # [B * W] int32: of the sampled tokens

    def attention(self, q_len: int | None, offset: int = 0) -> AttentionBatch:
        batch = super().attention(q_len, offset)
        return (
            replace(batch, kv_slots=self.kv_slots) if (q_len, offset) == (self.q_len, 0) else batch
        )


@dataclass(frozen=True)
class PageTables:
    """The page tables of a batch in one page space."""

    device: Tensor  # [B, pages] int32
    host: Sequence[Sequence[int]] | None = None  # of a prefill


class PlannedAttention:
    """Attention over the draft's pool, planned once per shape."""

    def __init__(
        self,
        attention: ModelAttention,
        tokens: StepTokens,
        buffers: StepBuffers | None,
        page_tables: Callable[[], PageTables] | None = None,
    ) -> None:
        """`page_tables`: of the draft, where its pool is in another page space than the target's.

        Called when they are first needed.
        """
        self._attention, self._tokens, self._buffers = attention, tokens, buffers
        self._page_tables = None if page_tables is None else cache(page_tables)
        self._planned: dict[tuple[AttentionBackend, int | None, int], AttentionContext] = {}

    def __call__(self, q_len: int | None, offset: int = 0) -> AttentionContext:
        """`ProposeInput.attention`."""
        return self._context(q_len, offset)

    def of_observe(self, token: int | None) -> AttentionContext:
        """`ObserveInput.make_attention`: over all tokens, or token i of each request."""
        if token is not None:
            return self._context(1, token)
        return self._context(self._tokens.q_len, 0, extends=True)

    def _context(self, q_len: int | None, offset: int, extends: bool = False) -> AttentionContext:
        """`extends`: see `ModelAttention.backend_of`."""
        key = (self._attention.backend_of(q_len, extends), q_len, offset)
        if key not in self._planned:
            batch = self._tokens.attention(q_len, offset)
            if self._page_tables is not None:
                own = self._page_tables()
                batch = replace(batch, page_table=own.device, host_pages=own.host, kv_slots=None)
            self._planned[key] = self._attention.context(batch, self._buffers, offset, extends)
        return self._planned[key]


@dataclass(frozen=True)
class TargetOutput:
    """What `observe` sees of the target's forward over T tokens of B requests."""

    input_ids: Tensor  # [T] int64
    hidden_states: Tensor  # [T, H]
    aux_hidden_states: Tensor | None  # [T, n * H]
    next_ids: Tensor  # [T] int64: the token after each
    num_committed: Tensor  # [B] int32


@dataclass(frozen=True)
class DecodeOutput:
    """The result of a decode step, and the input of an observe that has not run yet."""

    sampled: Tensor  # [B, W] int64: the token sampled after each verified one
    num_committed: Tensor  # [B] int32: how many of `sampled` are committed
    # None: already observed, or deferred. Built per replay, which overwrites the tensors.
    observe: Callable[[], ObserveInput] | None = None


@dataclass(frozen=True)
class PrefillOutput:
    """The result of a padded prefill, and the input of its observe."""

    sampled: Tensor  # [B] int64: the first token of each request
    observe: Callable[[], ObserveInput] | None = None  # as in `DecodeOutput`


def dummy_chunks(slot: int, tokens: int, longest: int, last: bool) -> list[PrefillChunk]:
    """`tokens` tokens as prompts of one slot, each of at most `longest` tokens."""
    starts = range(0, tokens, longest)
    return [PrefillChunk(slot, 0, min(longest, tokens - first), last) for first in starts]


def slots_and_positions(chunks: Sequence[PrefillChunk]) -> tuple[Tensor, Tensor]:
    """Of every token of the chunks, on the host: its slot [T] int64, its position [T] int32."""
    slots = [torch.full((c.num_tokens,), c.slot) for c in chunks]
    positions = [torch.arange(c.start, c.end, dtype=torch.int32) for c in chunks]
    return torch.cat(slots), torch.cat(positions)
