"""What goes into and comes out of a device step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend, AttentionBatch, AttentionContext
from forerun.attention.model_attention import ModelAttention, StepBuffers
from forerun.core.logprobs import LogprobParams
from forerun.core.plan import PrefillChunk, SlotLogprobs
from forerun.executor.step.grammar_masks import DraftCopy, GrammarBatch
from forerun.executor.step.pooling import PoolQuery
from forerun.kernels.sampling.bitmask import TokenMasks
from forerun.kernels.sampling.penalties import DraftPath
from forerun.kernels.speculation.ragged import PackedTokens, RaggedRows
from forerun.kernels.speculation.tree import Tree
from forerun.platform.device import upload
from forerun.sampling.logprobs import LogprobQuery, Logprobs
from forerun.sampling.sampler import SamplingFlags
from forerun.speculative.base import ObserveInput


@dataclass(frozen=True)
class StepShape:
    """What a decode step is specialised to."""

    num_verify_tokens: int  # W
    kv_len_ub: int  # upper bound of committed lengths plus the KV slots a step may write
    flags: SamplingFlags  # which sampling operations run
    logprobs: LogprobQuery | None = None  # of requests of the batch
    grammars: GrammarBatch | None = None  # of requests of the batch
    drafts: DraftCopy | None = None  # where the host reads the drafts, for grammars
    num_rows: int = 0  # N: tokens of all requests, at most W of each; 0: W of every request
    num_drafting: int = 0  # the first requests, for which drafts are made; 0: for all

    @property
    def edits_logits(self) -> bool:
        """Whether more than sampling is done with the logits; captured steps do not."""
        wants = self.logprobs is not None or self.grammars is not None
        return wants or self.flags.penalties


@dataclass(frozen=True)
class StepTokens:
    """T tokens of one forward, from which each pool's attention is planned."""

    slots: Tensor  # [B] int64
    page_table: Tensor  # [B, pages] int32
    start: Tensor  # [B] int32
    positions: Tensor  # [T] int32
    kv_len_ub: int
    q_len: int | None = None  # tokens of every request, or at most (`rows`); None: `ragged`
    ragged: tuple[tuple[int, int], ...] | None = None
    host_pages: Sequence[Sequence[int]] | None = None  # of a prefill
    cached: tuple[int, ...] = ()  # of `ragged` requests: tokens from the prefix cache
    rows: RaggedRows | None = None  # of a ragged verify pass: the tokens are packed

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Tokens of each request; with `rows` at most so many."""
        if self.ragged is not None:
            return tuple(count for _, count in self.ragged)
        assert self.q_len is not None
        return (self.q_len,) * self.slots.shape[0]

    def attention(self, q_len: int | None, offset: int = 0) -> AttentionBatch:
        """Attention of `q_len` tokens each, `offset` after their start; None: as `ragged`.

        With an offset below 0 they begin earlier, but not before what the request runs itself.
        """
        start, ragged = self.start, self.ragged
        if offset:
            start = start + offset
        if offset < 0 and ragged is not None:
            spans = zip(ragged, self.cached, strict=True)
            ragged = tuple((max(first + offset, own), count) for (first, count), own in spans)
            start = upload(torch.tensor([first for first, _ in ragged]).int(), start.device)
        elif offset < 0:
            start = start.clamp_min(0)
        return AttentionBatch(
            self.page_table,
            start,
            self.kv_len_ub,
            q_len=q_len,
            ragged=ragged,
            slots=self.slots,
            host_pages=self.host_pages,
        )


@dataclass(frozen=True, kw_only=True)
class DecodeTokens(StepTokens):
    """W tokens per request, or with `rows` at most W."""

    q_len: int  # W
    kv_slots: Tensor  # [T] int64
    last_token: Tensor  # [B] int64
    next_positions: Tensor  # [B * W] int32: of the sampled tokens

    def packed(self, tokens: PackedTokens) -> DecodeTokens:
        """The same, of a ragged pass."""
        return replace(self, positions=tokens.positions, kv_slots=tokens.kv_slots, rows=tokens.rows)

    def attention(self, q_len: int | None, offset: int = 0) -> AttentionBatch:
        batch = super().attention(q_len, offset)
        if (q_len, offset) != (self.q_len, 0):
            return batch
        return replace(batch, kv_slots=self.kv_slots, rows=self.rows)


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

    def __call__(
        self, q_len: int | None, offset: int = 0, tree: Tensor | None = None
    ) -> AttentionContext:
        """`ProposeInput.attention`; with a tree, planned anew."""
        if tree is None:
            return self._context(q_len, offset)
        batch = replace(self._batch(q_len, offset), tree=tree)
        return self._attention.context(batch, self._buffers, offset)

    def of_observe(self, token: int | None, before: int = 0) -> AttentionContext:
        """`ObserveInput.make_attention`."""
        if token is not None:
            return self._context(1, token - before)
        return self._context(self._tokens.q_len, -before, extends=True)

    def _context(self, q_len: int | None, offset: int, extends: bool = False) -> AttentionContext:
        """`extends`: see `ModelAttention.backend_of`."""
        key = (self._attention.backend_of(q_len, extends), q_len, offset)
        if key not in self._planned:
            batch = self._batch(q_len, offset)
            self._planned[key] = self._attention.context(batch, self._buffers, offset, extends)
        return self._planned[key]

    def _batch(self, q_len: int | None, offset: int) -> AttentionBatch:
        batch = self._tokens.attention(q_len, offset)
        if self._page_tables is None:
            return batch
        own = self._page_tables()
        return replace(batch, page_table=own.device, host_pages=own.host, kv_slots=None)


@dataclass(frozen=True)
class SampleInput:
    """B * W tokens of the target, after each of which a token is sampled.

    With `rows` the hidden states are packed, and past a request's width nothing counts.
    """

    hidden_states: Tensor  # [B * W, H], or [N, H]
    positions: Tensor  # [B, W] int: of the tokens to be sampled
    slots: Tensor  # [B] int64
    path: DraftPath | None = None  # the tokens that the target ran on; None: W is 1
    masks: TokenMasks | None = None  # of grammars; None: every token is allowed
    rows: RaggedRows | None = None

    def by_request(self) -> SampleInput:
        """The same with W rows of every request."""
        if self.rows is None:
            return self
        return replace(self, hidden_states=self.rows.unpack(self.hidden_states), rows=None)

    def by_row(self) -> SampleInput:
        """The same as N requests of one token each, for what looks at one row alone."""
        if self.rows is None:
            return self
        return SampleInput(
            self.hidden_states,
            self.rows.pack(self.positions.flatten()).unsqueeze(1),
            self.slots[self.rows.owner],
        )

    def between(self, first: int, last: int) -> SampleInput:
        """Returns the part of requests [first, last), of tokens that are not packed."""
        width = self.positions.shape[1]
        return SampleInput(
            self.hidden_states[first * width : last * width],
            self.positions[first:last],
            self.slots[first:last],
            None if self.path is None else self.path.between(first, last),
            None if self.masks is None else self.masks.between(first, last),
        )


@dataclass(frozen=True)
class SampledTokens:
    ids: Tensor  # [B, W] int64
    # Of the R requests of `StepShape.logprobs`: [R, W], and their indices in the batch [R] int64.
    logprobs: Logprobs | None = None
    rows: Tensor | None = None

    def logprobs_along(self, path: Tensor | None) -> Logprobs | None:
        """Along the accepted paths [B, W] int64 of trees; None: chains."""
        if self.logprobs is None or self.rows is None or path is None:
            return self.logprobs
        return self.logprobs.along(path[self.rows])


@dataclass(frozen=True)
class DecodeInput:
    """A decode step that has begun."""

    tokens: DecodeTokens
    shape: StepShape
    buffers: StepBuffers | None  # of attention backends that plan on the host
    attention: PlannedAttention | None  # of the draft; None: none, or `observe` plans it


@dataclass(frozen=True)
class VerifyPass:
    """The target's forward of a decode step, before its tokens are sampled."""

    given: DecodeInput
    tree: Tree | None  # None: a chain
    ids: Tensor  # [B, W] int64
    candidates: Tensor  # [B, K] int64: the drafts that may be accepted, else -1
    positions: Tensor  # [B, W] int32: of the tokens to be sampled
    hidden_states: Tensor  # [T, H]
    aux_hidden_states: Tensor | None  # [T, n * H]
    confidence: Tensor | None = None  # [B, K] float32, of `Draft`
    packed: PackedTokens | None = None  # the T tokens of a ragged pass; None: T is B * W

    @property
    def to_sample(self) -> SampleInput:
        path = DraftPath(self.ids, None if self.tree is None else self.tree.ancestors)
        slots = self.given.tokens.slots
        return SampleInput(self.hidden_states, self.positions, slots, path, rows=self.rows)

    @property
    def rows(self) -> RaggedRows | None:
        return None if self.packed is None else self.packed.rows


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
    path: Tensor | None = None  # [B, W] int64, of `Tree.accept`; None: a chain
    logprobs: Logprobs | None = None  # [R, W]: of the requests of `StepShape.logprobs`
    widths: Tensor | None = None  # [B] integers: tokens verified of each; None: W

    def of_first(self, count: int) -> DecodeOutput:
        """The tokens of the first `count` requests."""
        path, widths = (None if each is None else each[:count] for each in (self.path, self.widths))
        sampled, num_committed = self.sampled[:count], self.num_committed[:count]
        return DecodeOutput(sampled, num_committed, path=path, widths=widths)


@dataclass(frozen=True)
class PrefillLogprobs:
    """The log-probabilities that are asked of a prefill."""

    prompt: LogprobQuery | None  # rows: prompt tokens of all chunks
    first: LogprobQuery | None  # rows: last chunks, for the tokens sampled after them

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], asked: Mapping[int, SlotLogprobs]) -> Self | None:
        """`asked`: by slot."""
        if not asked:
            return None
        of_prompt: list[LogprobParams | None] = []
        for chunk in chunks:
            slot = asked.get(chunk.slot)
            if slot is None:
                of_prompt += [None] * chunk.num_tokens
                continue
            of_prompt += [  # a token's values come from the row before it
                slot.params if slot.start <= position + 1 < slot.end else None
                for position in range(chunk.start, chunk.end)
            ]
        of_first = [
            asked[chunk.slot].params if chunk.slot in asked else None
            for chunk in chunks
            if chunk.last
        ]
        return cls(LogprobQuery.of(of_prompt), LogprobQuery.of(of_first))


@dataclass(frozen=True)
class PrefillBatch:
    """Prompt chunks that run in one forward."""

    chunks: Sequence[PrefillChunk]
    flags: SamplingFlags  # of the tokens that are sampled after last chunks
    logprobs: PrefillLogprobs | None = None
    grammars: GrammarBatch | None = None  # of the requests of last chunks
    pooled: PoolQuery | None = None

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def edits_logits(self) -> bool:
        """What `StepShape.edits_logits` is."""
        wants = self.logprobs is not None or self.grammars is not None
        return wants or self.flags.penalties

    @property
    def reads_ends_only(self) -> bool:
        """Whether no hidden states are read but those of the chunks' last tokens."""
        of_prompt = self.logprobs is not None and self.logprobs.prompt is not None
        return not of_prompt and (self.pooled is None or self.pooled.reads_ends_only)


@dataclass(frozen=True)
class PrefillTokens:
    """The result of a prefill."""

    sampled: Tensor | None  # [n] int64: the first tokens, after the last chunks; None: n = 0
    first_logprobs: Logprobs | None = None  # [R, 1]
    prompt_logprobs: Logprobs | None = None  # [R, 1]
    pooled: Tensor | None = None  # [R, H] float64, of `PoolQuery.sums`


@dataclass(frozen=True)
class PrefillOutput:
    """The result of a padded prefill, and the input of its observe."""

    sampled: Tensor  # [B] int64: the first token of each request
    hidden_states: Tensor  # [B, H]: of the last token of each prompt
    observe: Callable[[], ObserveInput] | None = None  # as in `DecodeOutput`


def dummy_chunks(slot: int, tokens: int, longest: int, last: bool) -> list[PrefillChunk]:
    """`tokens` tokens as prompts of one slot, each of at most `longest` tokens."""
    starts = range(0, tokens, longest)
    return [PrefillChunk(slot, 0, min(longest, tokens - first), last) for first in starts]


def slots_and_positions(chunks: Sequence[PrefillChunk]) -> tuple[Tensor, Tensor]:
    """Returns every token's slot and position, [T] int64 each, on the host."""
    slots = [torch.full((c.num_tokens,), c.slot) for c in chunks]
    positions = [torch.arange(c.start, c.end, dtype=torch.int32) for c in chunks]
    return torch.cat(slots), torch.cat(positions)
