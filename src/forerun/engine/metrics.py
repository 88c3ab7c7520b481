"""What the engine counts for monitoring: times of steps and queue, prefix cache hits. No torch.

A few integers per step. `Engine.metrics` takes a snapshot, which another process may export; the
server does, as Prometheus metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.core.plan import ConfidenceCounts
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
    step_costs: dict[int, dict[float, float]]  # seconds of a decode step by batch size and W
    steps_by_width: dict[float, int]  # decode steps by W, the tokens verified per request
    request_steps: int  # decode steps, counted once per request
    decode_tokens: int  # that they committed
    # Verify steps with drafts, counted once per request, by the number of accepted drafts.
    accepted: list[int]
    draft_tokens: int
    confidences: ConfidenceCounts | None  # None: drafts have none
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

    def without_load(self) -> EngineMetrics:
        """The counters of an engine that has ended."""
        return replace(
            self,
            load=dict.fromkeys(self.load, 0),
            waiting_by_priority={},
            mixed_prefill_tokens=0,
            step_costs={},
        )


def combined(snapshots: Sequence[EngineMetrics]) -> EngineMetrics:
    """The sums over several engines with the same settings."""

    def sums(values: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
        total: Counter[Any] = Counter()
        for value in values:
            total.update(value)
        return dict(total)

    loads = sums(each.load for each in snapshots)
    page_size = max(each.load["page_size"] for each in snapshots)
    return EngineMetrics(
        load=loads | {"page_size": page_size},
        step_costs=_mean_costs([each.step_costs for each in snapshots]),
        steps_by_width=sums(each.steps_by_width for each in snapshots),
        request_steps=sum(each.request_steps for each in snapshots),
        decode_tokens=sum(each.decode_tokens for each in snapshots),
        accepted=[sum(counts) for counts in zip(*(e.accepted for e in snapshots), strict=True)],
        draft_tokens=sum(each.draft_tokens for each in snapshots),
        confidences=_added_confidences([e.confidences for e in snapshots if e.confidences]),
        algorithm_failures=sum(each.algorithm_failures for each in snapshots),
        prefix=PrefixCounts(
            sum(each.prefix.queries for each in snapshots),
            sum(each.prefix.hits for each in snapshots),
        ),
        tracked_states=sum(each.tracked_states for each in snapshots),
        preemptions=sum(each.preemptions for each in snapshots),
        queue_seconds=_added([each.queue_seconds for each in snapshots]),
        waiting_by_priority=sums(each.waiting_by_priority for each in snapshots),
        mixed_prefill_tokens=max(each.mixed_prefill_tokens for each in snapshots),
        decode_seconds=_added([each.decode_seconds for each in snapshots]),
        mixed_seconds=_added([each.mixed_seconds for each in snapshots]),
        prefill_seconds=_added([each.prefill_seconds for each in snapshots]),
        gap_seconds=sum(each.gap_seconds for each in snapshots),
    )


def _mean_costs(tables: Sequence[dict[int, dict[float, float]]]) -> dict[int, dict[float, float]]:
    found: dict[int, dict[float, list[float]]] = {}
    for table in tables:
        for size, costs in table.items():
            for width, seconds in costs.items():
                found.setdefault(size, {}).setdefault(width, []).append(seconds)
    return {
        size: {width: sum(given) / len(given) for width, given in costs.items()}
        for size, costs in found.items()
    }


def _added_confidences(given: Sequence[ConfidenceCounts]) -> ConfidenceCounts | None:
    def total(modes: Sequence[list[list[float]]]) -> list[list[float]]:
        rows = zip(*modes, strict=True)  # the same bin of each
        return [[sum(values) for values in zip(*row, strict=True)] for row in rows]

    if not given:
        return None
    return ConfidenceCounts(
        greedy=total([c.greedy for c in given]),
        sampled=total([c.sampled for c in given]),
        estimated=total([c.estimated for c in given]),
    )


def _added(histograms: Sequence[Histogram]) -> Histogram:
    counts = [sum(each) for each in zip(*(h.counts for h in histograms), strict=True)]
    return Histogram(histograms[0].bounds, counts, sum(h.total for h in histograms))


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
