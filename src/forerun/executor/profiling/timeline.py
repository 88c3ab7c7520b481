"""A profiler's trace split into steps: what ran on the GPU, and the gaps between steps.

A step is what its CUDA graph ran; without graphs, everything launched while the host was in the
step. The host gap is the time from its end to the start of the next step. Copies of results and
table updates that run in the gap do not shorten it. A step on a CPU is the operators that it ran.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from forerun.core.profile import DECODE_STEP

MARK = "user_annotation"  # the category of the annotation around every step of a trace
OPERATOR = "cpu_op"
OUTSIDE = "outside of operators"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """One kernel or copy. Microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class KernelRow:
    """All launches of one kernel, per step."""

    name: str
    count: float
    us: float  # exclusive: without overlap with kernels that started earlier; adds up to busy time
    span_us: float  # from start to end; with PDL that includes waiting for the previous kernel


def exclusive(spans: Iterable[Span]) -> list[Span]:
    """Sorted by start, each without its overlap with earlier spans; its duration may become 0."""
    out, latest = [], float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        start = max(span.start, min(latest, span.end))
        out.append(Span(span.name, start, span.end - start))
        latest = max(latest, span.end)
    return out


@dataclass(frozen=True)
class Timeline:
    """Consecutive steps of one engine."""

    steps: tuple[tuple[Span, ...], ...]  # each by start, never empty
    between: tuple[Span, ...] = ()  # copies and table updates outside the graphs

    @classmethod
    def of(cls, events: Iterable[Event], names: Collection[str] = (DECODE_STEP,)) -> Timeline:
        """Reads the events of a Chrome trace; steps without device work are skipped.

        Args:
            names: of the annotations around steps.
        """
        complete = [event for event in events if event.get("ph") == "X"]
        launched: dict[int, list[Span]] = {}
        for event in complete:
            if event.get("cat") in ON_DEVICE:
                span = Span(event["name"], event["ts"], event["dur"])
                launched.setdefault(event["args"]["correlation"], []).append(span)
        launches = sorted(
            (e for e in complete if e.get("cat") in LAUNCHES), key=lambda event: event["ts"]
        )
        times = [event["ts"] for event in launches]
        steps = []
        for begin, end in marks(complete, names):
            inside = launches[bisect_left(times, begin) : bisect_right(times, end)]
            graphs = [e for e in inside if e["name"].endswith("GraphLaunch")]
            spans = [
                span
                for event in graphs or inside
                for span in launched.pop(event["args"]["correlation"], ())
            ]
            if spans:
                steps.append(tuple(sorted(spans, key=lambda span: span.start)))
        rest = sorted((s for group in launched.values() for s in group), key=lambda s: s.start)
        return cls(tuple(steps), tuple(rest))

    @property
    def gaps(self) -> list[float]:
        """Microseconds from the end of each step but the last to the start of the next."""
        ends = [max(span.end for span in step) for step in self.steps]
        starts = [step[0].start for step in self.steps]
        return [max(0.0, start - end) for end, start in zip(ends, starts[1:], strict=False)]

    @property
    def periods(self) -> list[float]:
        """Microseconds from the start of a step to the start of the next."""
        return [after[0].start - before[0].start for before, after in pairwise(self.steps)]

    @property
    def host_gap(self) -> float | None:
        """Fraction of the time in gaps; None for fewer than two steps."""
        return sum(self.gaps) / sum(self.periods) if self.periods else None

    def kernels(self) -> list[KernelRow]:
        """Time by kernel, the largest first."""
        spans = [*(span for step in self.steps for span in step), *self.between]
        count = max(1, len(self.steps))
        launches = Counter(span.name for span in spans)
        whole, alone = _totals(spans), _totals(exclusive(spans))
        rows = [
            KernelRow(name, launches[name] / count, alone[name] / count, whole[name] / count)
            for name in launches
        ]
        return sorted(rows, key=lambda row: -row.us)


def marks(events: Iterable[Event], names: Collection[str]) -> list[tuple[float, float]]:
    """Begin and end of every step with one of these names, in order."""
    return sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") == MARK and event["name"] in names
    )


def within(steps: Sequence[tuple[float, float]]) -> Callable[[float], bool]:
    """Whether a time lies in one of these steps, which are in order."""
    begins = [begin for begin, _ in steps]

    def inside(time: float) -> bool:
        at = bisect_right(begins, time) - 1
        return at >= 0 and time <= steps[at][1]

    return inside


def operators(events: Iterable[Event], steps: Sequence[tuple[float, float]]) -> list[KernelRow]:
    """Time of the host by operator, the largest first; µs: without the operators that it calls.

    What remains of the steps' time is `OUTSIDE`: Python, and kernels that are no operators.

    Args:
        steps: begin and end of those to look at, in order.
    """
    inside = within(steps)
    calls: Counter[str] = Counter()
    whole: dict[str, float] = {}
    alone: dict[str, float] = {}
    outer: dict[int, list[tuple[str, float]]] = {}  # by thread: name and end of those still open
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") == OPERATOR]
    for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
        begin, duration, name = event["ts"], event["dur"], event["name"]
        if not inside(begin):
            continue
        open_ones = outer.setdefault(event["tid"], [])
        while open_ones and open_ones[-1][1] <= begin:
            open_ones.pop()
        if open_ones:
            alone[open_ones[-1][0]] -= duration
        open_ones.append((name, begin + duration))
        calls[name] += 1
        whole[name] = whole.get(name, 0.0) + duration
        alone[name] = alone.get(name, 0.0) + duration
    count = max(1, len(steps))
    if steps:
        outside = sum(end - begin for begin, end in steps) - sum(alone.values())
        outside = max(outside, 0.0)  # other threads may have run operators too
        calls[OUTSIDE], whole[OUTSIDE], alone[OUTSIDE] = len(steps), outside, outside
    rows = [KernelRow(n, calls[n] / count, alone[n] / count, whole[n] / count) for n in calls]
    return sorted(rows, key=lambda row: -row.us)


def _totals(spans: Iterable[Span]) -> dict[str, float]:
    out: dict[str, float] = {}
    for span in spans:
        out[span.name] = out.get(span.name, 0.0) + span.duration
    return out
