"""The width policy of ragged steps: the tokens of a step are divided among its requests.

The executor divides them by the survivals of the drafts, which it estimates on the device
(`speculative/ragged/`) and tells every few steps. From those, and from the costs of steps, follow
how many tokens a step verifies and for which requests it drafts (`verify_budget.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forerun.core.request import Request
from forerun.core.widths import captured_width
from forerun.scheduler.adaptive_width import Offer, ThroughputPolicy, VerifyOutcome
from forerun.scheduler.step_costs import StepCosts
from forerun.scheduler.verify_budget import BatchTimes, Budget, Survivals, budgets, drafting_options

INITIAL_RATE = 0.8  # before the first survivals arrive


class RaggedWidth(ThroughputPolicy):
    """The best budget (`verify_budget.py`)."""

    def __init__(
        self,
        widths: Sequence[float],
        costs: Mapping[int, Sequence[float]],
        drafting: Mapping[int, float] | None = None,
        parts: int = 8,
    ) -> None:
        """
        Args:
            widths: tokens per request, in the mean; the first is 1.
            costs: seconds of a step by batch size, one for every width.
            drafting: seconds of drafts alone by number of requests, if a step can draft for some.
            parts: of a batch, that a step can draft for.
        """
        super().__init__(widths, StepCosts(widths, costs, drafting))
        self._parts = parts
        self._budgets: dict[float, Budget] = {}  # of the last batch, by width
        self._of: object = None  # what these are of: requests, limits and tellings
        self._tellings = 0  # of survivals; costs change little from one to the next
        # Of a request that none are known of: [K], not rising.
        self._prior = tuple(INITIAL_RATE**k for k in range(1, self.max_drafts + 1))

    def record_survivals(
        self, requests: Sequence[Request], rows: Sequence[Sequence[float]]
    ) -> None:
        for request, row in zip(requests, rows, strict=False):
            request.survival = row
        self._prior = tuple(rows[-1])
        self._tellings += 1

    def _offers(self, requests: Sequence[Request], max_index: int) -> Sequence[Offer]:
        batch, full = len(requests), self.max_drafts + 1
        limits = [self._limit(request) for request in requests]
        given = list(requests), limits, self._tellings
        if given != self._of:
            indices = [i for i, w in enumerate(self.widths) if captured_width(w, batch, full) == w]
            found = budgets(self._survivals(requests, limits), self._times(batch, indices))
            self._budgets = {self.widths[i]: each for i, each in zip(indices, found, strict=True)}
            self._of = given
        # The pass of the next width serves, where the limit's own is not captured.
        most = captured_width(self.widths[max_index], batch, full)
        return [
            Offer(width, each.expected, each.seconds)
            for width, each in self._budgets.items()
            if width <= most
        ]

    def _drafting(self, width: float) -> tuple[int, ...] | None:
        budget = self._budgets.get(width)
        if budget is None or budget.drafting in (0, len(budget.order)):
            return None
        return budget.order[: budget.drafting]

    def _survivals(self, requests: Sequence[Request], limits: Sequence[int]) -> Survivals:
        rows = np.array([request.survival or self._prior for request in requests], np.float64)
        rows[np.arange(rows.shape[1]) >= np.array(limits)[:, None]] = 0.0
        return rows

    def _limit(self, request: Request) -> int:
        """Drafts that it takes in the next step, at most."""
        params = request.params
        left = params.max_new_tokens - len(request.output) - len(request.pending)
        return min(params.draft_limit(self.max_drafts), max(left - 1, 0))

    def _times(self, batch: int, indices: Sequence[int]) -> BatchTimes:
        """The steps of these widths."""
        costs, draft = self.costs[batch], self.costs.drafting
        options = [batch]
        if self.costs.drafts_apart:
            options = drafting_options(batch, self._parts)
        apart = draft(batch)
        return BatchTimes(
            tokens=[int(self.widths[i] * batch) for i in indices],
            verify=[costs[0], *(max(costs[i] - apart, costs[0]) for i in indices[1:])],
            drafting=options,
            draft=[draft(number) for number in options],
        )

    def _is_new(self, request: Request) -> bool:
        is_new = request.survival is None
        if is_new:
            request.survival = self._prior
        return is_new

    def as_dict(self) -> dict[str, Any]:
        """What is shown of every adaptive policy, with the seconds of drafts and the prior."""
        return super().as_dict() | {
            "draft_costs": self.costs.drafting_as_dict(),
            "survival": list(self._prior),
        }

    def record_outcomes(self, outcomes: Sequence[VerifyOutcome]) -> None:
        tokens = sum(1 + each.num_drafts for each in outcomes)
        if tokens > len(outcomes):
            self._compare_with_plain(outcomes, tokens / len(outcomes))
