"""What the engine counts for monitoring: times of steps and queue, prefix cache hits. No torch.

A few integers per step. `Engine.metrics` takes a snapshot, which another process may export; the
server does, as Prometheus metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from forerun.core.request import Request
from forerun.scheduler.scheduler import CompletedStep

# Upper bounds in seconds.
STEP_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2,
    0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
QUEUE_BUCKETS = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


@dataclass
class Histogram:
    """Counts of values by bucket."""

    bounds: tuple[float, ...]  # upper bounds, inclusive, ascending
    counts: list[int] = field(default_factory=list)  # one more: values over all bounds
    total: float = 0.0  # of all values

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass
class PrefixCounts:
    """Prompt tokens of admitted requests, and how many of them were cached."""

    queries: int = 0
    hits: int = 0


@dataclass(frozen=True)
class EngineMetrics:
    """A snapshot of an engine. All counters start at 0 with the engine."""

    load: dict[str, int]  # `Engine.load`
    steps_by_width: dict[int, int]  # decode steps by W, the tokens verified per request
    request_steps: int  # decode steps, counted once per request
    decode_tokens: int  # that they committed
    # Verify steps with drafts, counted once per request, by the number of accepted drafts.
    accepted: list[int]
    draft_tokens: int
    algorithm_failures: int
    prefix: PrefixCounts
    tracked_states: int  # recurrent states that were saved while requests decoded
    preemptions: int
    queue_seconds: Histogram  # from submission to the first admission
    waiting_by_priority: dict[int, int]  # requests
    mixed_prefill_tokens: int  # most prompt tokens of the next step with decode
    decode_seconds: Histogram  # device time of decode steps without prompt tokens
    mixed_seconds: Histogram  # with
    prefill_seconds: Histogram  # device time of steps with prompt tokens alone
    gap_seconds: float  # that the device waited for the host before steps of `decode_seconds`


class StepMetrics:
    """Counts steps and admissions."""

    def __init__(self) -> None:
        self.prefix = PrefixCounts()
        self.preemptions = 0
        self.queue_seconds = Histogram(QUEUE_BUCKETS)
        self.decode_seconds = Histogram(STEP_BUCKETS)
        self.mixed_seconds = Histogram(STEP_BUCKETS)
        self.prefill_seconds = Histogram(STEP_BUCKETS)
        self.gap_seconds = 0.0

    def admitted(self, request: Request, now: float) -> None:
        """A request got a slot: for the first time, or again after a preemption."""
        if request.preemptions:
            self.preemptions += 1
            return
        self.queue_seconds.observe(now - request.arrival)
        self.prefix.queries += len(request.prompt)
        self.prefix.hits += request.cached_tokens

    def completed(self, done: CompletedStep, idle: bool) -> None:
        """A step has completed. `idle`: the engine had no work before it."""
        plan = done.step.plan
        kind = self.decode_seconds
        if plan.prefill:
            kind = self.mixed_seconds if plan.decode else self.prefill_seconds
        elif not idle:
            self.gap_seconds += done.result.gap_seconds
        kind.observe(done.result.seconds)
