"""The width policy of ragged steps: the tokens of a step are divided among its requests.

The executor divides them by the survivals of the drafts, which it estimates on the device
(`speculative/ragged/`) and tells every few steps. From those, and from the costs of steps, follow
how many tokens a step verifies and for which requests it drafts (`verify_budget.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from forerun.core.request import Request
from forerun.core.widths import captured_width, drafting_width
from forerun.scheduler.adaptive_width import Offer, ThroughputPolicy, VerifyOutcome, WidthChoice
from forerun.scheduler.step_costs import StepCosts
from forerun.scheduler.verify_budget import BatchTimes, Budget, Survivals, budgets, drafting_options

INITIAL_RATE = 0.8  # before the first survivals arrive


class RaggedWidth(ThroughputPolicy):
    """The best budget (`verify_budget.py`)."""

    def __init__(
        self,
        widths: Sequence[float],
        costs: Mapping[int, Sequence[float]],
        drafting: Mapping[int, Mapping[int, float]] | None = None,
        parts: int = 8,
        is_uniform: Callable[[int], bool] = lambda requests: False,
    ) -> None:
        """
        Args:
            widths: tokens per request, in the mean; the first is 1.
            costs: seconds of a step by batch size, one for every width.
            drafting: seconds of drafts alone, if a step can draft for some of its requests: by the
                tokens of a request that they are made for, the last one included, and by the number
                of requests.
            parts: of a batch, that a step can draft for.
            is_uniform: `Limits.has_uniform_passes`.
        """
        super().__init__(widths, StepCosts(widths, costs, drafting))
        self._parts, self._is_uniform = parts, is_uniform
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
            self._budgets = self._best_budgets(self._survivals(requests, limits))
            self._of = given
        # The pass of the next width serves, where the limit's own is not captured.
        most = captured_width(self.widths[max_index], batch, full)
        return [
            Offer(width, each.expected, each.seconds)
            for width, each in self._budgets.items()
            if width <= most
        ]

    def _choice(self, width: float) -> WidthChoice:
        budget = self._budgets.get(width)
        if budget is None or width == 1:
            return WidthChoice(width)
        some = 0 < budget.drafting < len(budget.order)
        drafting = budget.order[: budget.drafting] if some else None
        return WidthChoice(width, drafting, budget.most if self._cuts_drafts else None)

    @property
    def _cuts_drafts(self) -> bool:
        """Whether steps can draft for fewer tokens of a request than for the full width."""
        return len(self.costs.drafting_widths) > 1

    def _best_budgets(self, survival: Survivals) -> dict[float, Budget]:
        """The best step of each width for a batch, with as many drafts of a request as pay."""
        batch, full, best = len(survival), self.max_drafts + 1, dict[float, Budget]()
        widths = [w for w in self.widths if captured_width(w, batch, full) == w]
        if self._is_uniform(batch):
            return self._uniform_budgets(survival, [int(width) for width in widths])
        fitting_of = {  # by the most tokens of one request
            most: [w for w in widths if w <= most <= self._most(batch, w) or w == 1]
            for most in self.costs.drafting_widths or [full]
        }
        for most, fitting in fitting_of.items():
            if len(fitting) == 1 and best:
                continue  # plain decoding alone
            found = budgets(survival[:, : most - 1], self._times(fitting, batch, most))
            for width, each in zip(fitting, found, strict=True):
                if width not in best or each.throughput > best[width].throughput:
                    best[width] = each
        return dict(sorted(best.items()))

    def _uniform_budgets(self, survival: Survivals, widths: Sequence[int]) -> dict[float, Budget]:
        """Steps in which all requests have as many drafts: they add what the first of each add."""
        batch, full, known = len(survival), self.max_drafts + 1, self.costs.drafting_widths
        times, order = self._times(widths, batch, full), tuple(range(batch))
        added = [0.0, *np.cumsum(survival.sum(0)).tolist()]
        found = {}
        for width, tokens, seconds in zip(widths, times.tokens, times.verify, strict=True):
            drafting = batch if width > 1 else 0
            seconds += self.costs.drafting(drafting, width if width in known else full)
            expected = batch + added[width - 1]
            found[float(width)] = Budget(tokens, drafting, order, expected, seconds, width)
        return found

    def _most(self, batch: int, width: float) -> int:
        """W of the measured step of this width."""
        known = self.costs.drafting_widths or [self.max_drafts + 1]
        return drafting_width(int(width * batch), batch, known)

    def _survivals(self, requests: Sequence[Request], limits: Sequence[int]) -> Survivals:
        rows = np.array([request.survival or self._prior for request in requests], np.float64)
        rows[np.arange(rows.shape[1]) >= np.array(limits)[:, None]] = 0.0
        return rows

    def _limit(self, request: Request) -> int:
        """Drafts that it takes in the next step, at most."""
        params = request.params
        left = params.max_new_tokens - len(request.output) - len(request.pending)
        return min(params.draft_limit(self.max_drafts), max(left - 1, 0))

    def _times(self, widths: Sequence[float], batch: int, most: int) -> BatchTimes:
        """The steps of these widths, with drafts for `most` tokens of a request.

        Where drafts for so many were not measured apart, those of the full width stand for them:
        they are taken off the measured step and added again.
        """
        costs, draft = self.costs[batch], self.costs.drafting
        if most not in self.costs.drafting_widths:
            most = self.max_drafts + 1
        options = [batch]
        if self.costs.drafts_apart and most > self.max_drafts:
            options = drafting_options(batch, self._parts)
        measured = [
            costs[self.widths.index(w)] - draft(batch, self._most(batch, w)) for w in widths
        ]
        return BatchTimes(
            tokens=[int(width * batch) for width in widths],
            verify=[costs[0], *(max(each, costs[0]) for each in measured[1:])],
            drafting=options,
            draft=[draft(number, most) for number in options],
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

    def record_step_time(self, batch_size: int, choice: WidthChoice, seconds: float) -> None:
        if choice.width > 1:  # as if it had drafted as the measured step does
            measured = self._most(batch_size, choice.width)
            number = batch_size if choice.drafting is None else len(choice.drafting)
            draft = self.costs.drafting
            seconds += draft(batch_size, measured) - draft(number, choice.most or measured)
        super().record_step_time(batch_size, choice, seconds)

    def record_outcomes(self, outcomes: Sequence[VerifyOutcome]) -> None:
        tokens = sum(1 + each.num_drafts for each in outcomes)
        if tokens > len(outcomes):
            self._compare_with_plain(outcomes, tokens / len(outcomes))
