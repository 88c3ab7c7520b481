"""Chooses how many tokens the next decode step verifies per request (the width W). No torch.

A wider step yields more tokens and costs more; both depend on the text, the batch and the machine.
So every step gets the width with the highest expected throughput:

    tokens(W)     = expected tokens, the sum over all requests
    cost(B, W)    = seconds of a decode step, measured at start and corrected while running
    throughput(W) = tokens(W) / cost(B, W)

Expected tokens follow from each request's acceptance rates (`acceptance_stats.py`), of a chain of
W - 1 drafts or of a tree of so many. Where a step divides its tokens among the requests, W is their
mean (`ragged_width.py`). Width 1 is plain decoding. Estimates use completed steps only, and the
text does not depend on the width.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import add
from typing import Any, NamedTuple

from forerun.core.request import Request
from forerun.scheduler.acceptance_stats import AcceptanceStats, BestFirstTree, Chain, DraftShape
from forerun.scheduler.step_costs import COST_WEIGHT, StepCosts

# Windows of the acceptance rates, in observations.
REQUEST_WINDOW = 16.0
GLOBAL_WINDOW = 32.0
MIN_GLOBAL_STEPS = 2.0  # the global window covers at least this many steps of the batch

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
# Steps of other widths while one pays.
REVISIT_SHARE = 0.002  # of the time of steps with drafts
REVISIT_AFTER = 8  # steps with drafts in a row
CHEAPER = 0.9  # of the expected cost: a step below it is followed by another one of its width


class WidthChoice(NamedTuple):
    """What a step verifies."""

    width: float  # tokens per request, in the mean
    # Indices of the requests that it drafts for; None: all of them, if the width is over 1.
    drafting: tuple[int, ...] | None = None
    # Most tokens of one request, for which drafts are made; None: as `Limits.verify_shape` says.
    most: int | None = None


class Offer(NamedTuple):
    """A step that a policy may choose."""

    width: float
    expected: float  # tokens, over all requests
    seconds: float

    @property
    def throughput(self) -> float:
        return self.expected / self.seconds


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


PLAIN = WidthChoice(1)


class WidthPolicy(ABC):
    """Chooses the width of every step; results and times of steps are reported to it."""

    def __init__(self, widths: Sequence[float]) -> None:
        self.widths = tuple(widths)
        self.chosen: Counter[float] = Counter()  # steps by width

    def choose(self, requests: Sequence[Request]) -> WidthChoice:
        """The width of the next step for these requests."""
        most = self.max_drafts
        wanted = 1 + max(r.params.draft_limit(most) for r in requests) if most else 1
        at = bisect.bisect_left(self.widths, wanted)
        width = self._choose(requests, at) if wanted > 1 else 1
        self.chosen[width] += 1
        return self._choice(width)

    @property
    def max_drafts(self) -> int:
        """Drafts of a request in the widest step."""
        return int(self.widths[-1]) - 1

    @abstractmethod
    def _choose(self, requests: Sequence[Request], max_index: int) -> float:
        """One of `self.widths[: max_index + 1]`."""

    def _choice(self, width: float) -> WidthChoice:
        """A step of this width: which requests draft in it, and how much."""
        return WidthChoice(width)

    def record_plain_step(self, requests: Sequence[Request]) -> None:
        """A step without drafts."""
        return None

    def record_outcomes(self, outcomes: Sequence[VerifyOutcome]) -> None:
        """The acceptance of one step with drafts."""
        return None

    def record_survivals(
        self, requests: Sequence[Request], rows: Sequence[Sequence[float]]
    ) -> None:
        """Survivals of each request's drafts and, in one more row, of a new request's."""
        return None

    def record_step_time(self, batch_size: int, choice: WidthChoice, seconds: float) -> None:
        """The time of one step."""
        return None

    def step_costs(self) -> dict[int, dict[float, float]]:
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

    def __init__(self, widths: Sequence[float]) -> None:
        super().__init__(widths)
        self._costs: dict[int, dict[float, float]] = {}  # by batch size, rounded up, and width

    def _choose(self, requests: Sequence[Request], max_index: int) -> float:
        return self.widths[max_index]

    def record_step_time(self, batch_size: int, choice: WidthChoice, seconds: float) -> None:
        """It is only shown: no decision depends on it."""
        costs = self._costs.setdefault(1 << (batch_size - 1).bit_length(), {})
        before = costs.get(choice.width, seconds)
        costs[choice.width] = seconds + (1 - COST_WEIGHT) * (before - seconds)

    def step_costs(self) -> dict[int, dict[float, float]]:
        return {size: dict(self._costs[size]) for size in sorted(self._costs)}


class ThroughputPolicy(WidthPolicy):
    """The step with the most expected tokens per second, and some to find out what is expected."""

    def __init__(self, widths: Sequence[float], costs: StepCosts) -> None:
        super().__init__(widths)
        self.costs = costs
        self._exploration_budget = 0.0  # seconds
        self._exploration_scale = 1.0  # doubled when drafts pay off, halved when exploring did not
        self._exploration_steps = 0
        self._exploring = False  # the last step with drafts was for exploration
        self._paid_off = False  # it was faster than plain steps
        self._steps_since_plain = 0
        self._revisit_budget = float("inf")  # seconds; the first is free
        self._visited: set[float] = set()  # widths that have run since all others have
        self._revisited: float | None = None  # the last one that ran for its cost only

    @abstractmethod
    def _offers(self, requests: Sequence[Request], max_index: int) -> Sequence[Offer]:
        """A step of each of `self.widths[: max_index + 1]`; those that run alike once."""

    @staticmethod
    def _explored(offers: Sequence[Offer]) -> Offer:
        return next((each for each in offers if each.width >= EXPLORED_WIDTH), offers[-1])

    @abstractmethod
    def _is_new(self, request: Request) -> bool:
        """Whether nothing is known of its acceptance. True once only."""

    def _choose(self, requests: Sequence[Request], max_index: int) -> float:
        offers = self._offers(requests, max_index)
        plain, best = offers[0], max(offers, key=lambda each: each.throughput)
        if best.throughput > MIN_GAIN * plain.throughput:
            self._steps_since_plain += 1
            uncertain = best.throughput < UNCERTAIN_GAIN * plain.throughput
            if not (uncertain and self._steps_since_plain >= REMEASURE_INTERVAL):
                if self._steps_since_plain > REVISIT_AFTER:
                    best = self._revisit(offers, best)
                return best.width
        elif self._explore(requests, plain, explored := self._explored(offers)):
            return explored.width
        self._steps_since_plain = 0
        return 1

    def _explore(self, requests: Sequence[Request], plain: Offer, explored: Offer) -> bool:
        """Whether this step drafts although plain decoding is expected to be faster.

        Plain steps say nothing about acceptance, and texts change. So a fixed share of their time
        is spent on narrow steps with drafts (`EXPLORED_WIDTH`, or as the requests' limits allow);
        one that paid off is repeated at once.
        A request that is alone may be unlike those before it: its share is granted as it begins.
        """
        granted = self._exploration_scale * EXPLORATION_SHARE
        if len(requests) == 1 and self._is_new(requests[0]):
            granted += NEW_REQUEST_SHARE * min(requests[0].params.max_new_tokens, NEW_REQUEST_STEPS)
        self._exploration_budget += granted * plain.seconds
        loss = 1 - explored.throughput / plain.throughput  # expected, of the time of the step
        cost = explored.seconds * max(loss, MIN_EXPLORATION_COST)
        if not self._paid_off and self._exploration_budget < cost:
            return False
        self._exploration_budget = max(self._exploration_budget - cost, 0.0)
        self._exploration_steps += 1
        self._paid_off, self._exploring = False, True
        return True

    def _revisit(self, offers: Sequence[Offer], best: Offer) -> Offer:
        """The best step, or at times one of a width that has not run for long.

        Its cost may have been measured too high, or have fallen since, and nothing else would show
        that while another width pays.
        """
        self._revisit_budget += REVISIT_SHARE * best.seconds
        self._visited.add(best.width)
        others = [each for each in offers[1:] if each.width not in self._visited]
        if not others:
            self._visited.clear()
            return best
        other = max(others, key=lambda each: each.throughput)
        loss = 1 - other.throughput / best.throughput
        if self._revisit_budget < other.seconds * max(loss, MIN_EXPLORATION_COST):
            return best
        self._revisit_budget = 0.0
        self._visited.add(other.width)
        self._revisited = other.width
        return other

    def as_dict(self) -> dict[str, Any]:
        """What `WidthPolicy` shows, with the steps that explored."""
        return super().as_dict() | {
            "adaptive": True,
            "exploration_steps": self._exploration_steps,
        }

    def step_costs(self) -> dict[int, dict[float, float]]:
        return self.costs.as_dict()

    def record_step_time(self, batch_size: int, choice: WidthChoice, seconds: float) -> None:
        ratio = self.costs.record(batch_size, choice.width, seconds)
        if choice.width == self._revisited:
            self._revisited = None
            if ratio < CHEAPER:
                self._visited.discard(choice.width)
                self._revisit_budget = float("inf")

    def _compare_with_plain(self, outcomes: Sequence[VerifyOutcome], width: float) -> None:
        """Adjusts exploration by whether a step with drafts was faster than plain decoding."""
        costs, batch = self.costs[len(outcomes)], len(outcomes)
        cost = costs[bisect.bisect_left(self.widths, width)]
        num_tokens = sum(1 + each.num_accepted for each in outcomes)
        self._paid_off = num_tokens / cost > batch / costs[0]
        if self._paid_off:
            self._exploration_scale = min(2 * self._exploration_scale, MAX_EXPLORATION_SCALE)
        elif self._exploring:
            self._exploration_scale = max(self._exploration_scale / 2, 1.0)
        self._exploring = False


class AdaptiveWidth(ThroughputPolicy):
    """One width for all requests."""

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
        super().__init__(widths, StepCosts(widths, costs))
        self._makes_trees = tree_depth is not None
        self._shape: DraftShape = Chain(widths)
        if tree_depth is not None:
            self._shape = BestFirstTree(widths, tree_depth)
        # Over all requests: the prior of every request's own rates.
        self._acceptance = AcceptanceStats(self._shape, GLOBAL_WINDOW)
        self._rates = self._acceptance.estimates()
        self._expected_tokens = self._shape.expected_tokens(self._rates)

    def _offers(self, requests: Sequence[Request], max_index: int) -> Sequence[Offer]:
        if self._makes_trees:  # requests limit their depth
            max_index = len(self.widths) - 1
        expected = self._expected_tokens_of(requests, max_index + 1)
        offers = zip(self.widths, expected, self.costs[len(requests)], strict=False)
        return [Offer(width, tokens, cost) for width, tokens, cost in offers]

    def _is_new(self, request: Request) -> bool:
        is_new = request.acceptance is None
        if is_new:
            request.acceptance = self._new_stats()
        return is_new

    def _expected_tokens_of(self, requests: Sequence[Request], num_widths: int) -> list[float]:
        """Expected tokens of a step over all requests, for the smallest `num_widths` widths."""
        totals = [0.0] * num_widths
        for request in requests:
            params = request.params
            left = params.max_new_tokens - len(request.output) - len(request.pending)
            limit = min(1 + params.draft_limit(self.max_drafts), max(left, 1))
            expected = (request.expected_tokens or self._expected_tokens)[:num_widths]
            if expected[-1] > limit:  # they do not fall
                expected = tuple(min(tokens, limit) for tokens in expected)
            totals = list(map(add, totals, expected))
        return totals

    def as_dict(self) -> dict[str, Any]:
        """What is shown of every adaptive policy, with global acceptance rates."""
        return super().as_dict() | {"accept_rates": list(self._rates)}

    def record_plain_step(self, requests: Sequence[Request]) -> None:
        self._acceptance.record_plain_step()
        for request in requests:
            if request.acceptance is not None:
                request.acceptance.record_plain_step()

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
        self._compare_with_plain(outcomes, 1 + max(each.num_drafts for each in outcomes))
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
