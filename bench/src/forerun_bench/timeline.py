"""A profiler's trace split into decode steps: what ran on the GPU, and the gaps between steps.

A step is what its CUDA graph ran; without graphs, everything launched while the host was in the
step. The host gap is the time from its end to the start of the next step. Copies of results and
table updates that run in the gap do not shorten it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

STEP = "decode step"  # the annotation around every step of a trace
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
    def of(cls, events: Iterable[Event]) -> Timeline:
        """From the events of a Chrome trace; steps without device work are skipped."""
        complete = [event for event in events if event.get("ph") == "X"]
        marks = sorted(
            (e["ts"], e["ts"] + e["dur"])
            for e in complete
            if e.get("cat") == "user_annotation" and e["name"] == STEP
        )
        launched: dict[int, list[Span]] = {}
        for event in complete:
            if event.get("cat") in ON_DEVICE:
                span = Span(event["name"], event["ts"], event["dur"])
                launched.setdefault(event["args"]["correlation"], []).append(span)
        launches = [e for e in complete if e.get("cat") in LAUNCHES]
        steps = []
        for begin, end in marks:
            inside = [e for e in launches if begin <= e["ts"] <= end]
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


def _totals(spans: Iterable[Span]) -> dict[str, float]:
    out: dict[str, float] = {}
    for span in spans:
        out[span.name] = out.get(span.name, 0.0) + span.duration
    return out
