"""What the scheduler asks of an executor in one step, and what comes back. Plain data, no torch.

A plan holds ints, floats, strings and tuples only. So it can be serialised (`core/codec.py`) and
executed in this process, in another one, or by several ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that scheduler and executor share; fixed once an engine has started."""

    slots: int
    page_size: int
    max_verify_tokens: int  # W: tokens that a decode step verifies for a request, at most
    kv_reserve: int  # KV slots past the committed length that a step may write
    chunked_prefill_size: int  # prompt tokens a step, over all requests
    context_length: int
    overlap_depth: int  # steps that may be in flight when the next one is scheduled
    max_pending_observe: int = 0  # plain steps whose observe may be deferred; 0: none

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    @property
    def overshoot(self) -> int:
        """KV slots past its last token that a request can touch before the host sees its end."""
        return self.kv_reserve + self.overlap_depth * self.max_verify_tokens

    @property
    def max_positions(self) -> int:
        """Positions a request can touch, and one more for the token sampled last."""
        return self.context_length + self.overshoot + 1


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """Sampling parameters of one request as the device tables hold them."""

    temperature: float  # 0: greedy
    top_k: int  # -1: off
    top_p: float
    min_p: float
    seed: int  # signed, 64 bits
    # Stop ids are masked at positions below `min_position`; () and 0: nothing is masked.
    stop_ids: tuple[int, ...] = ()
    min_position: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Admission:
    """A slot changes hands: the device rows of `slot` are set for request `rid`."""

    slot: int
    rid: str
    tokens: tuple[int, ...]  # the prompt, and after a preemption also the output so far
    cached_len: int  # of them, tokens whose K/V came from the prefix cache
    max_drafts: int  # drafts a step that this request accepts, at most
    sampling: SlotSampling


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """Recurrent state of a slot, to or from a row of the snapshot pool."""

    slot: int
    row: int


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Entries [first, first + len(pages)) of a slot's page-table row."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One request of the fixed-width decode step."""

    slot: int
    kv_len_ub: int  # upper bound of the committed length when the step runs


@dataclass(frozen=True, slots=True)
class DeferredCount:
    """The newest `count` tokens of a slot, which the algorithm observes before this step."""

    slot: int
    count: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + num_tokens) of a slot; after the last chunk one token is sampled."""

    slot: int
    start: int
    num_tokens: int
    last: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(slots=True)
class StepPlan:
    """One step, executed in this order: cleared pages, admissions, snapshots loaded, page-table
    writes, deferred observes, the decode step, prefill chunks, snapshots saved."""

    # Pages that a failed request wrote: NaN in K/V would reach others even where it is masked.
    cleared_pages: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    load_snapshots: list[SnapshotCopy] = field(default_factory=list)  # of admitted requests
    page_writes: list[PageWrite] = field(default_factory=list)
    deferred: list[DeferredCount] = field(default_factory=list)
    decode: list[DecodeRequest] = field(default_factory=list)
    num_verify_tokens: int = 1  # W of this step: tokens verified for each request of `decode`
    prefill: list[PrefillChunk] = field(default_factory=list)
    save_snapshots: list[SnapshotCopy] = field(default_factory=list)  # after chunks of `prefill`


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, on the host."""

    decode: list[list[int]]  # accepted drafts and the bonus token of each request, in order
    prefill: list[int | None]  # the sampled token of each chunk; None: not the last chunk
    seconds: float = 0.0  # how long the executor was busy with the step
    error: str | None = None  # the algorithm failed in this step; the tokens are still right
    # (slot, reason) of requests that cannot go on; those after them in the step are not affected.
    failed: tuple[tuple[int, str], ...] = ()
    # Unix ns of the boundaries begin, proposed, verified, committed; where steps are traced.
    phase_times: tuple[int, ...] | None = None
