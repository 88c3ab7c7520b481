"""The scheduler's state of a request. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from forerun.core.logprobs import LogprobParams, TokenLogprobs
from forerun.core.plan import SlotGrammar, SlotLogprobs, SlotSampling
from forerun.core.pooling import Pooling
from forerun.core.sampling_params import SamplingParams
from forerun.core.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams

QUEUE_TIMEOUT, REQUEST_TIMEOUT = "queue_timeout", "request_timeout"  # names of the parameters


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why generation ended: `type` is "stop" (`matched`: token id or stop string), "length" or
    "abort" (`err_type`: which deadline has passed, `QUEUE_TIMEOUT` or `REQUEST_TIMEOUT`; or
    `GRAMMAR_ERROR`: its own grammar is the reason)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    err_type: str | None = None

    def as_dict(self) -> dict[str, Any]:
        extra = {
            "matched": self.matched,
            "length": self.length,
            "message": self.message,
            "err_type": self.err_type,
        }
        return {"type": self.type, **{k: v for k, v in extra.items() if v is not None}}


class State(Enum):
    WAITING = "waiting"  # in the queue: no slot, no pages
    PREFILL = "prefill"  # has a slot; chunks of its tokens are being launched
    DECODE = "decode"
    FINISHED = "finished"  # slot and pages are released once no step in flight can write them


@dataclass(eq=False)
class RequestRecord:
    """The output of a request and its statistics, also where the engine is in another process."""

    rid: str
    prompt: tuple[int, ...]
    arrival: float = field(default_factory=time.monotonic, kw_only=True)
    output: list[int] = field(default_factory=list, kw_only=True)  # nothing past a stop
    finish: FinishReason | None = field(default=None, kw_only=True)

    logprobs: LogprobParams | None = field(default=None, kw_only=True)  # what it returns
    output_logprobs: list[TokenLogprobs] = field(default_factory=list, kw_only=True)  # per token
    # Of the prompt tokens after position `logprobs.start`, in order.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, kw_only=True)

    pooling: Pooling | None = field(default=None, kw_only=True)  # what it returns instead of text
    # The sums of the hidden states that it pools, one per chunk that has some: H float64 each.
    pooled: list[bytes] = field(default_factory=list, kw_only=True)

    cached_tokens: int = field(default=0, kw_only=True)  # prompt tokens found in the prefix cache
    proposed: int = field(default=0, kw_only=True)  # drafts
    # Per verify step: tokens kept, and of them, drafts (not the bonus).
    accept_lengths: list[int] = field(default_factory=list, kw_only=True)
    correct_drafts: list[int] = field(default_factory=list, kw_only=True)
    first_token_at: float | None = field(default=None, kw_only=True)
    finished_at: float | None = field(default=None, kw_only=True)

    def trim(self, num_tokens: int) -> None:
        """Cuts the output and the statistics of its steps to the first `num_tokens` tokens."""
        cut = len(self.output) - num_tokens
        del self.output[num_tokens:], self.output_logprobs[num_tokens:]
        self.accept_lengths = drop_last(self.accept_lengths, cut)
        # Among the tokens of a step, the drafts come first.
        self.correct_drafts = [
            min(pair) for pair in zip(self.correct_drafts, self.accept_lengths, strict=True)
        ]


@dataclass(eq=False)
class Request(RequestRecord):
    """One sequence. Lengths ending in `_ub` are the host's upper bounds of device lengths."""

    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # EOS (unless ignored) and stop_token_ids
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    state: State = State.WAITING
    # Set by the scheduler: (rank of its priority, number of its arrival). Smaller goes first.
    order: tuple[int, int] = (0, 0)
    failed: bool = False  # its logits were NaN or infinite, and its newest K/V may be as well

    # Owned while admitted.
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    node: Any = None  # node of the prefix cache, locked while admitted
    cached_len: int = 0  # tokens whose K/V came from the prefix cache at the last admission
    prefill_tokens: tuple[int, ...] = ()  # prompt; after a preemption also the output
    prefill_done: int = 0  # how many of them were launched
    # Lengths at which prefill saves snapshots of recurrent state, and those saved until the prefix
    # cache owns them, as (length, row).
    snapshots_at: tuple[int, ...] = ()
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    tracked_row: int | None = None  # for the next one that a decode step saves
    kv_len: int = 0  # committed KV slots, as of the last result
    pending: list[int] = field(default_factory=list)  # per step in flight: tokens it may add
    pending_observe: int = 0  # last tokens, whose observe is deferred

    # Owned by the width policy; None before the first step with drafts.
    acceptance: Any = None  # acceptance rates so far
    expected_tokens: tuple[float, ...] | None = None  # per step, for every width
    survival: Sequence[float] | None = None  # of its drafts, as the executor last told

    preemptions: int = 0
    verify_ct: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    @property
    def shareable_tokens(self) -> tuple[int, ...]:
        """Its first tokens, as far as their K/V may come from the prefix cache.

        A token whose hidden state is asked for is computed. The log-probabilities of the token at
        a position come from the one before it.
        """
        if self.pooling in ("mean", "cls"):
            return ()
        asked = self.slot_logprobs
        # At least one token of the prompt is left to compute.
        return (
            self.tokens if asked is None or asked.start >= asked.end else self.tokens[: asked.start]
        )

    @property
    def prefill_left(self) -> int:
        """Tokens that are not launched yet, of an admitted request."""
        return len(self.prefill_tokens) - self.prefill_done

    @property
    def kv_len_ub(self) -> int:
        return self.kv_len + sum(self.pending)

    @property
    def sampling(self) -> SlotSampling:
        """Its sampling parameters for the device tables."""
        params = self.params
        # With a grammar, stop ids are masked together with what it forbids.
        masks = params.min_new_tokens > 0 and bool(self.stop_ids) and params.grammar is None
        shared = params.shared() | ({"temperature": 0.0} if params.greedy else {})
        return SlotSampling(
            **shared,
            seed=self.seed,
            stop_ids=tuple(sorted(self.stop_ids)) if masks else (),
            # The first new token has position len(prompt).
            min_position=len(self.prompt) + params.min_new_tokens if masks else 0,
        )

    @property
    def slot_grammar(self) -> SlotGrammar | None:
        params, grammar = self.params, self.params.grammar
        if grammar is None:
            return None
        return SlotGrammar(grammar, params.min_new_tokens, params.stop_token_ids, params.ignore_eos)

    @property
    def slot_logprobs(self) -> SlotLogprobs | None:
        """What an admission now asks for: after a preemption, what is still missing."""
        if self.logprobs is None:
            return None
        end = len(self.prompt)
        start = self.logprobs.start(end) + 1 + len(self.prompt_logprobs)
        return SlotLogprobs(self.logprobs, start, end)


def drop_last(lengths: Sequence[int], count: int) -> list[int]:
    """Lengths of consecutive runs after the last `count` tokens are dropped; runs may become 0."""
    out = list(lengths)
    for i in reversed(range(len(out))):
        if count <= 0:
            break
        out[i], count = max(out[i] - count, 0), count - out[i]
    return out
