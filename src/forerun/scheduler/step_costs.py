"""Seconds of a decode step by batch size and width: measured at start, corrected while running."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

COST_WEIGHT = 0.1  # of the newest step in the moving average of a cost
FASTER_WEIGHT = 4.0  # times (1 - ratio): larger weight of steps faster than expected
OUTLIER_RATIO = 1.25  # a single step this much slower than expected is ignored


class StepCosts:
    """A table by batch size and width, and the part of it that drafts take."""

    def __init__(
        self,
        widths: Sequence[float],
        measured: Mapping[int, Sequence[float]],
        drafting: Mapping[int, Mapping[int, float]] | None = None,
    ) -> None:
        """
        Args:
            widths: tokens verified per request, ascending; the first is 1.
            measured: seconds of a step by batch size, one for every width.
            drafting: of these, the seconds that drafts take, by their number for a request + 1, and
                by the number of requests that they are made for; None: they are made for all.
        """
        self._widths = tuple(widths)
        self._batch_sizes = sorted(measured)
        self._costs = [self._bounded(measured[size]) for size in self._batch_sizes]
        self._drafting = {w: sorted(of.items()) for w, of in sorted((drafting or {}).items())}
        # (index into the batch sizes, width) -> whether the last step there was an outlier
        self._slow: dict[tuple[int, float], bool] = {}

    def __getitem__(self, batch_size: int) -> list[float]:
        """Seconds of a step for every width.

        Interpolated linearly between the measured batch sizes; proportional to the batch size
        above the largest.
        """
        sizes = self._batch_sizes
        at = bisect.bisect_left(sizes, batch_size)
        if at == len(sizes):
            return [cost * batch_size / sizes[-1] for cost in self._costs[-1]]
        if len(nearest := self._nearest(batch_size)) == 1:
            return nearest[0]
        below, above = sizes[at - 1 : at + 1]
        weight = (batch_size - below) / (above - below)
        return [a + weight * (b - a) for a, b in zip(*nearest, strict=True)]

    @property
    def drafts_apart(self) -> bool:
        """Whether a step can draft for some of its requests only."""
        return bool(self._drafting)

    @property
    def drafting_widths(self) -> list[int]:
        """Tokens of a request, the last one included, that a step can draft for; ascending."""
        return list(self._drafting)

    def drafting(self, num_requests: int, width: int) -> float:
        """Seconds that drafts for so many requests take; 0 where that is not known.

        `width`: one of `drafting_widths`.
        """
        known = self._drafting.get(width)
        if not known or num_requests == 0:
            return 0.0
        at = bisect.bisect_left(known, (num_requests, 0.0))
        if at == len(known):
            return known[-1][1] * num_requests / known[-1][0]
        if at == 0 or known[at][0] == num_requests:
            return known[at][1]
        (below, less), (above, more) = known[at - 1 : at + 1]
        return less + (more - less) * (num_requests - below) / (above - below)

    def as_dict(self) -> dict[int, dict[float, float]]:
        """The table as it is now: by batch size, then by width."""
        rows = (dict(zip(self._widths, costs, strict=True)) for costs in self._costs)
        return dict(zip(self._batch_sizes, rows, strict=True))

    def drafting_as_dict(self) -> dict[int, dict[int, float]]:
        """Seconds of drafts by their number for a request + 1, and by the number of requests."""
        return {width: dict(known) for width, known in self._drafting.items()}

    def record(self, batch_size: int, width: float, seconds: float) -> float:
        """Corrects the table by the time of one step; returns its ratio to the expected
        time, between 0.5 and 2.
        """
        i = self._widths.index(width)
        # Steps faster than expected weigh more, so that a cost measured too high is soon corrected.
        ratio = min(max(seconds / self[batch_size][i], 0.5), 2.0)
        weight = max(COST_WEIGHT, FASTER_WEIGHT * (1 - ratio)) if ratio > 0.875 else 0.5
        if not self._is_outlier(batch_size, width, ratio):
            for costs in self._nearest(batch_size):
                costs[i] *= 1 + weight * (ratio - 1)
        return ratio

    def _bounded(self, measured: Sequence[float]) -> list[float]:
        """Limits outliers of the measurement, after which a width would never be chosen again.

        No wider step is cheaper, and a step of width W costs no more than W plain steps.
        """
        costs = list(measured)
        for i in reversed(range(len(costs) - 1)):
            costs[i] = min(costs[i], costs[i + 1])
        pairs = zip(self._widths, costs, strict=True)
        return [min(cost, width * costs[0]) for width, cost in pairs]

    def _nearest(self, batch_size: int) -> list[list[float]]:
        """The measured costs of this batch size, or of the next smaller and the next larger one."""
        sizes = self._batch_sizes
        at = bisect.bisect_left(sizes, batch_size)
        exact = at < len(sizes) and sizes[at] == batch_size
        return self._costs[max(at - (not exact), 0) : at + 1]

    def _is_outlier(self, batch_size: int, width: float, ratio: float) -> bool:
        """Much slower than expected, and the step before it at this size and width was not."""
        key = bisect.bisect_left(self._batch_sizes, batch_size), width
        before, self._slow[key] = self._slow.get(key, False), ratio > OUTLIER_RATIO
        return self._slow[key] and not before
