"""Chooses how many tokens the next decode step verifies per request (the width W). No torch.

A wider step yields more tokens and costs more; both depend on the text, the batch and the machine.
So every step gets the width with the highest expected throughput:

    tokens(W)     = expected tokens, the sum over all requests
    cost(B, W)    = seconds of a decode step, measured at start and corrected while running
    throughput(W) = tokens(W) / cost(B, W)

Expected tokens follow from each request's acceptance rates (`acceptance_stats.py`), of a chain of
W - 1 drafts or of a tree of so many. Width 1 is plain decoding. Estimates use completed steps only,
and the text does not depend on the width.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forerun.core.request import Request
from forerun.scheduler.acceptance_stats import AcceptanceStats, BestFirstTree, Chain, DraftShape

# Windows of the acceptance rates, in observations.
REQUEST_WINDOW = 16.0
GLOBAL_WINDOW = 32.0
MIN_GLOBAL_STEPS = 2.0  # the global window covers at least this many steps of the batch

# Step costs.
COST_WEIGHT = 0.1  # of the newest step in the moving average of a cost
FASTER_WEIGHT = 4.0  # times (1 - ratio): larger weight of steps faster than expected
OUTLIER_RATIO = 1.25  # a single step this much slower than expected is ignored

# Drafts or plain decoding.
MIN_GAIN = 1.02  # expected speed-up over plain steps below which drafts are not used
UNCERTAIN_GAIN = 1.1  # below this speed-up, the cost of plain steps is measured again
REMEASURE_INTERVAL = 50  # consecutive steps with drafts before that

# Exploration: steps with drafts although plain ones are expected to be faster.
EXPLORATION_SHARE = 0.0025  # of the time of plain steps
NEW_REQUEST_SHARE = 0.005  # of the first plain steps of a new request that is alone, in addition
NEW_REQUEST_STEPS = 128  # at most so many
MAX_EXPLORATION_SCALE = 16.0  # largest factor on that share, after drafts that paid off
MIN_EXPLORATION_COST = 0.1  # of the step's time, whatever loss is expected
EXPLORED_WIDTH = 4  # at least, if there are wider steps: one draft says too little


def verify_widths(full: int, flexible: bool) -> tuple[int, ...]:
    """The widths that steps can have: 1, the full one, and powers of two between them."""
    between = [1 << n for n in range(1, full.bit_length())] if flexible else []
    return (1, *(w for w in between if w <= 0.75 * full), *([full] if full > 1 else []))


class VerifyOutcome(NamedTuple):
    """One request's part of a decode step."""

    request: Request
    num_drafts: int  # verified for it; 0: a plain step
    num_accepted: int
    nodes: Sequence[int] | None = None  # of a tree: the accepted drafts, counted from 1

    @property
    def accepted(self) -> Sequence[int]:
        """The accepted drafts, counted from 1."""
        return range(1, self.num_accepted + 1) if self.nodes is None else self.nodes


class WidthPolicy(ABC):
    """Chooses the width of every step; results and times of steps are reported to it."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self.chosen: Counter[int] = Counter()  # steps by width

    def choose(self, requests: Sequence[Request]) -> int:
        """The width of the next step for these requests."""
        wanted = 1 + max(r.params.draft_limit(self.widths[-1] - 1) for r in requests)
        width = self._choose(requests, bisect.bisect_left(self.widths, wanted)) if wanted > 1 else 1
        self.chosen[width] += 1
        return width

    @abstractmethod
    def _choose(self, requests: Sequence[Request], max_index: int) -> int:
        """One of `self.widths[: max_index + 1]`."""

    def record_outcomes(self, outcomes: Sequence[VerifyOutcome]) -> None:
        """The acceptance of one step."""
        return None

    def record_step_time(self, batch_size: int, width: int, seconds: float) -> None:
        """The time of one step."""
        return None

    def step_costs(self) -> dict[int, dict[int, float]]:
        """Seconds of a decode step by batch size and width, as far as they are known."""
        return {}

    def as_dict(self) -> dict[str, Any]:
        """The policy's state and its decisions, for `Engine.stats()`."""
        costs = self.step_costs()
        return {
            "adaptive": False,
            "steps_by_width": {width: self.chosen[width] for width in self.widths},
            "exploration_steps": 0,
            "step_costs": {
                size: [of_size.get(width) for width in self.widths]
                for size, of_size in costs.items()
            },
        }


class FixedWidth(WidthPolicy):
    """The full width, or the smallest that covers every request's draft limit."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(widths)
        self._costs: dict[int, dict[int, float]] = {}  # by batch size, rounded up, and width

    def _choose(self, requests: Sequence[Request], max_index: int) -> int:
        return self.widths[max_index]

    def record_step_time(self, batch_size: int, width: int, seconds: float) -> None:
        """It is only shown: no decision depends on it."""
        costs = self._costs.setdefault(1 << (batch_size - 1).bit_length(), {})
        costs[width] = seconds + (1 - COST_WEIGHT) * (costs.get(width, seconds) - seconds)

    def step_costs(self) -> dict[int, dict[int, float]]:
        return {size: dict(self._costs[size]) for size in sorted(self._costs)}


class AdaptiveWidth(WidthPolicy):
    """The width with the most expected tokens per second."""

    def __init__(
        self,
        widths: Sequence[int],
        costs: Mapping[int, Sequence[float]],
        tree_depth: int | None = None,
    ) -> None:
        """
        Args:
            costs: seconds of a step by batch size, one for every width.
            tree_depth: drafts on the longest path of a draft tree; None: drafts are chains.
        """
        super().__init__(widths)
        self._makes_trees = tree_depth is not None
        self._shape: DraftShape = Chain(self.widths)
        if tree_depth is not None:
            self._shape = BestFirstTree(self.widths, tree_depth)
        self._batch_sizes = sorted(costs)
        self._costs = [self._bounded(costs[size]) for size in self._batch_sizes]
        # (index into the batch sizes, width) -> whether the last step there was an outlier
        self._slow: dict[tuple[int, int], bool] = {}
        # Over all requests: the prior of every request's own rates.
        self._acceptance = AcceptanceStats(self._shape, GLOBAL_WINDOW)
        self._rates = self._acceptance.estimates()
        self._expected_tokens = self._shape.expected_tokens(self._rates)
        self._exploration_budget = 0.0  # seconds
        self._exploration_scale = 1.0  # doubled when drafts pay off, halved when exploring did not
        self._exploration_steps = 0
        self._exploring = False  # the last step with drafts was for exploration
        self._paid_off = False  # it was faster than plain steps
        self._steps_since_plain = 0
        self._explored = bisect.bisect_left(self.widths[:-1], EXPLORED_WIDTH)  # index of a width

    # --- choosing -------------------------------------------------------------------------------

    def _choose(self, requests: Sequence[Request], max_index: int) -> int:
        if self._makes_trees:  # requests limit their depth
            max_index = len(self.widths) - 1
        costs = self.costs(len(requests))
        expected = self._expected_tokens_of(requests, max_index + 1)
        throughput = [tokens / cost for tokens, cost in zip(expected, costs, strict=False)]
        best = max(range(max_index + 1), key=throughput.__getitem__)
        if throughput[best] > MIN_GAIN * throughput[0]:
            self._steps_since_plain += 1
            uncertain = throughput[best] < UNCERTAIN_GAIN * throughput[0]
            if not (uncertain and self._steps_since_plain >= REMEASURE_INTERVAL):
                return self.widths[best]
        elif self._explore(requests, costs, throughput):
            return self.widths[min(self._explored, max_index)]
        self._steps_since_plain = 0
        return 1

    def _explore(
        self, requests: Sequence[Request], costs: Sequence[float], throughput: Sequence[float]
    ) -> bool:
        """Whether this step drafts although plain decoding is expected to be faster.

        Plain steps say nothing about acceptance, and texts change. So a fixed share of their time
        is spent on narrow steps with drafts (`EXPLORED_WIDTH`, or as the requests' limits allow);
        one that paid off is repeated at once.
        A request that is alone may be unlike those before it: its share is granted as it begins.
        """
        granted = self._exploration_scale * EXPLORATION_SHARE
        if len(requests) == 1 and requests[0].acceptance is None:
            requests[0].acceptance = self._new_stats()
            granted += NEW_REQUEST_SHARE * min(requests[0].params.max_new_tokens, NEW_REQUEST_STEPS)
        self._exploration_budget += granted * costs[0]
        explored = min(self._explored, len(throughput) - 1)
        loss = 1 - throughput[explored] / throughput[0]  # expected, of the time of the step
        cost = costs[explored] * max(loss, MIN_EXPLORATION_COST)
        if not self._paid_off and self._exploration_budget < cost:
            return False
        self._exploration_budget = max(self._exploration_budget - cost, 0.0)
        self._exploration_steps += 1
        self._paid_off, self._exploring = False, True
        return True

    def _expected_tokens_of(self, requests: Sequence[Request], num_widths: int) -> list[float]:
        """Expected tokens of a step over all requests, for the smallest `num_widths` widths."""
        totals = [0.0] * num_widths
        for request in requests:
            params = request.params
            left = params.max_new_tokens - len(request.output) - len(request.pending)
            limit = min(1 + params.draft_limit(self.widths[-1] - 1), max(left, 1))
            expected = request.expected_tokens or self._expected_tokens
            for i in range(num_widths):
                totals[i] += min(expected[i], limit)
        return totals

    def costs(self, batch_size: int) -> list[float]:
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

    def _bounded(self, measured: Sequence[float]) -> list[float]:
        """Limits outliers of the measurement, after which a width would never be chosen again.

        No wider step is cheaper, and a step of width W costs no more than W plain steps.
        """
        costs = list(measured)
        for i in reversed(range(len(costs) - 1)):
            costs[i] = min(costs[i], costs[i + 1])
        return [min(cost, width * costs[0]) for width, cost in zip(self.widths, costs, strict=True)]

    def _nearest(self, batch_size: int) -> list[list[float]]:
        """The measured costs of this batch size, or of the next smaller and the next larger one."""
        sizes = self._batch_sizes
        at = bisect.bisect_left(sizes, batch_size)
        exact = at < len(sizes) and sizes[at] == batch_size
        return self._costs[max(at - (not exact), 0) : at + 1]

    def step_costs(self) -> dict[int, dict[int, float]]:
        rows = (dict(zip(self.widths, costs, strict=True)) for costs in self._costs)
        return dict(zip(self._batch_sizes, rows, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """What `WidthPolicy` shows, with step costs by batch size and global acceptance rates."""
        return super().as_dict() | {
            "adaptive": True,
            "exploration_steps": self._exploration_steps,
            "accept_rates": list(self._rates),
        }

    # --- updating the estimates -----------------------------------------------------------------

    def record_outcomes(self, outcomes: Sequence[VerifyOutcome]) -> None:
        drafted = []
        for outcome in outcomes:
            if outcome.num_drafts > 0:
                observed = self._shape.observed(outcome.num_drafts, outcome.accepted)
                drafted.append((outcome.request, observed))
            elif outcome.request.acceptance is not None:
                outcome.request.acceptance.record_plain_step()
        if not drafted:
            self._acceptance.record_plain_step()
            return
        self._compare_with_plain(outcomes)
        self._acceptance.window = max(GLOBAL_WINDOW, MIN_GLOBAL_STEPS * len(drafted))
        for _, observed in drafted:
            self._acceptance.record(*observed)
        self._rates = self._acceptance.estimates()
        self._expected_tokens = self._shape.expected_tokens(self._rates)
        for request, observed in drafted:
            if request.acceptance is None:
                request.acceptance = self._new_stats()
            request.acceptance.record(*observed)
            rates = request.acceptance.estimates(self._rates)
            request.expected_tokens = self._shape.expected_tokens(rates)

    def _new_stats(self) -> AcceptanceStats:
        """Those of a request."""
        return AcceptanceStats(self._shape, REQUEST_WINDOW)

    def _compare_with_plain(self, outcomes: Sequence[VerifyOutcome]) -> None:
        """Adjusts exploration by whether a step with drafts was faster than plain decoding."""
        costs = self.costs(len(outcomes))
        width = 1 + max(each.num_drafts for each in outcomes)
        cost = costs[bisect.bisect_left(self.widths, width)]
        num_tokens = sum(1 + each.num_accepted for each in outcomes)
        self._paid_off = num_tokens / cost > len(outcomes) / costs[0]
        if self._paid_off:
            self._exploration_scale = min(2 * self._exploration_scale, MAX_EXPLORATION_SCALE)
        elif self._exploring:
            self._exploration_scale = max(self._exploration_scale / 2, 1.0)
        self._exploring = False

    def record_step_time(self, batch_size: int, width: int, seconds: float) -> None:
        i = self.widths.index(width)
        # Steps faster than expected weigh more, so that a cost measured too high is soon corrected.
        ratio = min(max(seconds / self.costs(batch_size)[i], 0.5), 2.0)
        weight = max(COST_WEIGHT, FASTER_WEIGHT * (1 - ratio)) if ratio > 0.875 else 0.5
        if self._is_outlier(batch_size, width, ratio):
            return
        for costs in self._nearest(batch_size):
            costs[i] *= 1 + weight * (ratio - 1)

    def _is_outlier(self, batch_size: int, width: int, ratio: float) -> bool:
        """Much slower than expected, and the step before it at this size and width was not."""
        key = bisect.bisect_left(self._batch_sizes, batch_size), width
        before, self._slow[key] = self._slow.get(key, False), ratio > OUTLIER_RATIO
        return self._slow[key] and not before
