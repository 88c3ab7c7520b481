"""Running estimates of acceptance rates, from which expected tokens per step follow. No torch.

Rates of a chain are c_1, c_2, ...: the probability that draft k is accepted, given that drafts 1 to
k - 1 were. Rates of a tree, whose nodes come best first, belong to the steps from one width to the
next: the accepted nodes among those that the wider tree adds, per doubling of the width. (A tree of
W tokens is the beginning of every wider one, so a step tests all narrower trees too.)

A mean of few observations is unreliable, and draft k is only tested where all drafts before it were
accepted. So every mean is blended with a prior that counts as `PRIOR_WEIGHT` observations:

    estimate_k = (n_k * mean_k + PRIOR_WEIGHT * prior_k) / (n_k + PRIOR_WEIGHT)

The prior of one request's rate k is the estimate over all requests. The prior of the estimate over
all requests follows from its estimate of rate k - 1 (`DraftShape.next_rate`), and n_k then counts
all observations rather than those of the window, so that the prior only matters for rates that were
hardly ever tested.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import log2
from operator import mul

INITIAL_RATE = 0.8  # prior of the first rate; high, so that drafts are tried
PRIOR_WEIGHT = 4.0  # observations that a prior counts as
DECAY = 0.995  # per step without drafts: weight that past observations keep


class DraftShape(ABC):
    """What the rates of a step's drafts are, and the tokens that they promise."""

    num_rates: int

    @abstractmethod
    def observed(self, num_drafts: int, nodes: Sequence[int]) -> tuple[list[float], int]:
        """What a verify step of `num_drafts` drafts says: a value for each of the first rates, up
        to the first that was not tested, and how many rates those drafts have.

        `nodes`: the accepted drafts, counted from 1.
        """

    @abstractmethod
    def next_rate(self, k: int, rate: float) -> float:
        """What rate k, counted from 0, lets one expect of rate k + 1."""

    @abstractmethod
    def expected_tokens(self, rates: Sequence[float]) -> tuple[float, ...]:
        """Expected tokens of a step of each width."""


class Chain(DraftShape):
    """Each draft follows the one before it."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = widths
        self.num_rates = widths[-1] - 1

    def observed(self, num_drafts: int, nodes: Sequence[int]) -> tuple[list[float], int]:
        accepted = min(len(nodes), num_drafts)
        rejected = [0.0] if accepted < num_drafts else []  # those after it were not tested
        return [1.0] * accepted + rejected, num_drafts

    def next_rate(self, k: int, rate: float) -> float:
        return rate

    def expected_tokens(self, rates: Sequence[float]) -> tuple[float, ...]:
        """1 + c_1 + c_1 c_2 + ... + c_1 ... c_(W-1)."""
        sums = list(accumulate(accumulate(rates, mul), initial=1.0))
        return tuple(sums[width - 1] for width in self._widths)


class BestFirstTree(DraftShape):
    """Nodes follow earlier ones, the most probable first."""

    def __init__(self, widths: Sequence[int], depth: int) -> None:
        """`depth`: drafts on the longest path."""
        self._widths, self._depth = widths, depth
        self._doublings = [log2(wider / width) for width, wider in pairwise(widths)]
        self.num_rates = len(self._doublings)

    def observed(self, num_drafts: int, nodes: Sequence[int]) -> tuple[list[float], int]:
        tested = bisect.bisect_right(self._widths, num_drafts + 1) - 1
        within = [bisect.bisect_left(nodes, width) for width in self._widths[: tested + 1]]
        added = (wider - width for width, wider in pairwise(within))
        return [n / size for n, size in zip(added, self._doublings, strict=False)], tested

    def next_rate(self, k: int, rate: float) -> float:
        """The same per doubling; twice as much if all nodes are accepted, as in a sure chain."""
        nodes = self._widths[k + 1] - self._widths[k]
        return rate * (1 + min(rate * self._doublings[k] / nodes, 1.0))

    def expected_tokens(self, rates: Sequence[float]) -> tuple[float, ...]:
        added = map(mul, rates, self._doublings)
        return tuple(min(n, 1.0 + self._depth) for n in accumulate(added, initial=1.0))


class AcceptanceStats:
    """Exponential moving averages of the rates of one request or of all requests."""

    def __init__(self, shape: DraftShape, window: float) -> None:
        """`window`: observations that a moving average covers at most."""
        self._shape, self.window = shape, window
        num_rates = shape.num_rates
        self._means = [0.0] * num_rates
        self._counts = [0.0] * num_rates  # observations in the window of each mean
        self._totals = [0.0] * num_rates  # all observations
        self._plain_steps = 0  # since the last observation

    def record_plain_step(self) -> None:
        """A step without drafts: past observations lose weight, because texts change."""
        self._plain_steps += 1

    def record(self, values: Sequence[float], num_rates: int) -> None:
        """Takes what `DraftShape.observed` returns of a verify step."""
        if self._plain_steps:
            decay = DECAY**self._plain_steps
            self._counts = [count * decay for count in self._counts]
            self._plain_steps = 0
        means, counts, totals, window = self._means, self._counts, self._totals, self.window
        for k, value in enumerate(values):
            counts[k] = min(counts[k] + 1, window)
            means[k] += (value - means[k]) / counts[k]
            totals[k] += 1
        if len(values) < num_rates or not (values and values[-1]):
            return
        # The last drafts were accepted: what is known of those beyond them becomes outdated.
        for k in range(num_rates, len(counts)):
            counts[k] *= 1 - 1 / window
            totals[k] = min(totals[k], window) * (1 - 1 / window)

    def estimates(self, priors: Sequence[float] | None = None) -> list[float]:
        """The rates.

        Args:
            priors: the estimates over all requests; None: these are the estimates over all.
        """
        if priors is not None:
            return [
                (count * mean + PRIOR_WEIGHT * prior) / (count + PRIOR_WEIGHT)
                for mean, count, prior in zip(self._means, self._counts, priors, strict=True)
            ]
        rates, prior = [], INITIAL_RATE
        for k, (mean, count) in enumerate(zip(self._means, self._totals, strict=True)):
            rates.append((count * mean + PRIOR_WEIGHT * prior) / (count + PRIOR_WEIGHT))
            prior = self._shape.next_rate(k, rates[-1])
        return rates
