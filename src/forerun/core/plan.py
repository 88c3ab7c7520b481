"""Step plans (scheduler to executor) and step results (executor to scheduler). No torch.

A plan consists of ints, floats, strings, lists and tuples only. So it can be serialised
(`core/codec.py`) and executed in this process, in another one, or by several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.core.grammar import Grammar
from forerun.core.logprobs import LogprobParams, TokenLogprobs
from forerun.core.pooling import Pooling
from forerun.core.sampling_params import LogitParams
from forerun.core.widths import DRAFTING_BATCH, captured_width, drafting_width, verify_widths


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that scheduler and executor share; fixed once the engine has started."""

    slots: int
    page_size: int
    max_verify_tokens: int  # largest W: tokens that a decode step verifies per request
    kv_reserve: int  # KV slots beyond the committed length that a step may write
    chunked_prefill_size: int  # prompt tokens per step, over all requests
    context_length: int
    overlap_depth: int  # steps that may be in flight when the next one is scheduled
    max_pending_observe: int = 0  # plain steps per request whose observe may be deferred
    window: int = 0  # K/V positions that windowed pools keep behind a token; 0: no such pools
    ragged: bool = False  # the tokens of a verify pass are divided among its requests on the device
    cuts_drafts: bool = False  # a step may make fewer than K drafts, for all of its requests
    # Full passes of at most so many tokens: smaller ones take no less time, so that nothing is won
    # by dividing their tokens, and fewer drafts are made.
    uniform_tokens: int = 0

    def verify_shape(self, requests: int, width: float, most: int | None = None) -> tuple[int, int]:
        """W and N of a step that verifies `width` tokens of each request, in the mean.

        N is 0 where every request has W. A ragged pass is one between plain and full width. Its W
        is no larger than what one request can get, if all others get one token (the rest of the
        drafts would be made for nothing), or it is `most`.
        """
        full = self.max_verify_tokens
        if not self.ragged or width == 1:
            return int(width), 0
        width = captured_width(width, requests, full)
        if width == full:
            return full, 0
        if most is None and self.has_uniform_passes(requests):
            return int(width), 0
        rows = int(requests * width)
        wide = most or drafting_width(rows, requests, verify_widths(full, self.cuts_drafts))
        return wide, 0 if rows == requests * wide else rows

    def has_uniform_passes(self, requests: int) -> bool:
        """Whether so many requests have no ragged ones."""
        small = requests * self.max_verify_tokens <= self.uniform_tokens
        return self.cuts_drafts and small and requests < DRAFTING_BATCH

    def pages(self, tokens: int) -> int:
        """Pages needed for this many tokens."""
        return -(-tokens // self.page_size)

    @property
    def overshoot(self) -> int:
        """KV slots beyond its last token that a request may touch before the host knows its end."""
        return self.kv_reserve + self.overlap_depth * self.max_verify_tokens

    def room(self, prompt_tokens: int, num_pages: int) -> int:
        """New tokens that fit behind a prompt, in a pool of so many pages; below 1: it does not."""
        in_pool = num_pages * self.page_size - self.overshoot
        return min(self.context_length, in_pool) - prompt_tokens

    @property
    def window_reach(self) -> int:
        """Positions before the committed length whose K/V is kept in window pages.

        What may be read, or written by a deferred observe; and a page, so that a text can be shared
        up to its last whole page, together with the window before that.
        """
        return self.window + self.max_pending_observe + self.page_size

    @property
    def decode_window_pages(self) -> int:
        """Window pages that a request in decode holds at most."""
        return self.pages(self.window_reach + self.overshoot) + 1

    @property
    def prompt_window_pages(self) -> int:
        """Window pages that a prompt takes at most, for the window before a chunk and the chunk."""
        return self.pages(self.window_reach + self.chunked_prefill_size + self.overshoot) + 1

    @property
    def max_window_pages(self) -> int:
        """Window pages that a request holds at most, those of a shared prefix included."""
        return self.prompt_window_pages + self.pages(self.window_reach) + 1

    @property
    def max_positions(self) -> int:
        """Positions that a request may touch, plus one for the last sampled token."""
        return self.context_length + self.overshoot + 1


@dataclass(frozen=True, slots=True)
class SlotSampling(LogitParams):
    """Sampling parameters of one request, as stored in the device tables."""

    seed: int = 0  # signed, 64 bits
    # Stop ids are masked at positions below `min_position`; () and 0: no masking.
    stop_ids: tuple[int, ...] = ()
    min_position: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class SlotLogprobs:
    """The log-probabilities that a request returns, from its admission on."""

    params: LogprobParams
    # Prompt tokens at positions [start, end) whose values are still to be computed.
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SlotGrammar:
    """The grammar of a request, and when its output may end.

    A stop id is masked as long as the grammar allows another token: in the first `min_new_tokens`
    tokens, and EOS with `ignore_eos` always.
    """

    grammar: Grammar
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # of the request; EOS comes from the model
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """Assigns a slot to a request: its rows of the device tables are initialised."""

    slot: int
    rid: str
    tokens: tuple[int, ...]  # the prompt; after a preemption also the output so far
    cached_len: int  # number of tokens whose K/V is in the prefix cache
    max_drafts: int  # drafts that this request may accept per step
    sampling: SlotSampling
    num_output_tokens: int = 0  # how many of `tokens`, its last ones, the request has generated
    logprobs: SlotLogprobs | None = None
    grammar: SlotGrammar | None = None
    tenant: int = 0  # of its `SchedulingParams`
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """Recurrent state of a slot, to or from a row of the snapshot pool."""

    slot: int
    row: int


@dataclass(frozen=True, slots=True)
class TrackedState:
    """A length in a decode step's reach: the recurrent state there goes to a snapshot row.

    Only the device knows which step passes it; each that may is asked to, and only that one writes.
    """

    slot: int
    row: int
    length: int


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Entries [first, first + len(pages)) of a slot's row in a page table."""

    slot: int
    first: int
    pages: tuple[int, ...]


class DecodeRequest(NamedTuple):
    """One request of a decode step."""

    slot: int
    kv_len_ub: int  # upper bound of the committed length when the step starts


@dataclass(frozen=True, slots=True)
class DeferredCount:
    """Deferred observe: the last `count` tokens of a slot, observed before this step."""

    slot: int
    count: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens [start, start + num_tokens) of a slot; the last chunk samples one token."""

    slot: int
    start: int
    num_tokens: int
    last: bool
    cached: int = 0  # tokens of the request that came from the prefix cache

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(slots=True)
class StepPlan:
    """One step, executed in this order: cleared pages, admissions, snapshots loaded, page-table
    writes, deferred observes, the decode step, states tracked, prefill chunks, snapshots saved."""

    # K/V pages of failed requests, to be zeroed: NaN would reach other requests even if masked.
    cleared_pages: list[int] = field(default_factory=list)
    cleared_window_pages: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    load_snapshots: list[SnapshotCopy] = field(default_factory=list)  # of admitted requests
    page_writes: list[PageWrite] = field(default_factory=list)
    window_writes: list[PageWrite] = field(default_factory=list)  # in the table of window pages
    deferred: list[DeferredCount] = field(default_factory=list)
    decode: list[DecodeRequest] = field(default_factory=list)
    # W of this step: tokens verified for each request of `decode`, or at most (`num_rows`)
    num_verify_tokens: int = 1
    num_rows: int = 0  # N: tokens verified for all of them; 0: W for each
    # D, of a ragged step: drafts are made for the first D requests of `decode` only; 0: for all.
    num_drafting: int = 0
    tracked: list[TrackedState] = field(default_factory=list)  # of requests of `decode`
    prefill: list[PrefillChunk] = field(default_factory=list)
    save_snapshots: list[SnapshotCopy] = field(default_factory=list)  # after chunks of `prefill`

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefill)


GRAMMAR_ERROR = "grammar"  # the `err_type` of what the request's own grammar causes


class Failure(NamedTuple):
    """A request that cannot continue, and why; other requests are not affected."""

    slot: int
    reason: str
    err_type: str | None = None  # of its `FinishReason`


CONFIDENCE_BINS = 10  # of equal width


@dataclass(frozen=True, slots=True)
class ConfidenceCounts:
    """Tested drafts by mode and confidence since the start: per bin, how many, how many of them
    were accepted, and the sum of their confidences.
    """

    greedy: list[list[float]]
    sampled: list[list[float]]
    estimated: list[list[float]]  # of all drafts, by the rate that ragged steps go by


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, on the host."""

    decode: list[list[int]]  # per request: accepted drafts and the bonus token
    # Per chunk: the sampled token; None unless it is the last chunk, or if it does not count.
    prefill: list[int | None]
    seconds: float = 0.0  # time that the device spent on the step
    error: str | None = None  # the algorithm failed in this step; the tokens are valid
    failed: tuple[Failure, ...] = ()
    # Unix ns of the phase boundaries begin, proposed, verified, committed, if tracing is on.
    phase_times: tuple[int, ...] | None = None
    # Log-probabilities, for requests that return them: per request, one entry for every token of
    # `decode`; per chunk, of the prompt tokens that it predicts, then of the token in `prefill`.
    # Empty if no request of the step does.
    decode_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    prefill_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    # Per chunk, the sum of the hidden states that its request pools: H float64, or no bytes where
    # there are none. Empty if no request of the step pools.
    prefill_pooled: list[bytes] = field(default_factory=list)
    gap_seconds: float = 0.0  # that the device was idle since the previous step, at most
    # Slots of requests that must leave the batch until `Executor.can_resume`: their grammars take
    # long. Their tokens, where there are any, are valid.
    held: tuple[int, ...] = ()
    confidences: ConfidenceCounts | None = None  # every so many steps, if drafts have them
    warning: str | None = None  # what the first steps have shown, told once
    # Per request, the drafts of a tree that were accepted: their nodes, ascending. Empty: chains.
    decode_nodes: list[list[int]] = field(default_factory=list)
    # Of every request of `decode`, then of one that nothing is known of: the probabilities that its
    # drafts are accepted with all those before them. Every so many ragged steps.
    survivals: list[list[float]] = field(default_factory=list)
    # Per request, how many tokens were verified. Empty: `StepPlan.num_verify_tokens` of each.
    decode_widths: list[int] = field(default_factory=list)
    # The device had ended the step before the host looked, as after the launch of a long one.
    late: bool = False

    def drafts_of(self, plan: StepPlan) -> list[int]:
        """Drafts verified for each request of `decode`."""
        widths = self.decode_widths or [plan.num_verify_tokens] * len(plan.decode)
        return [width - 1 for width in widths]
