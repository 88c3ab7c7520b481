"""How many rows the next step verifies: as many as pay. No torch.

A wider step yields more tokens and costs more, and how much of either depends on the text, on the
batch and on the machine. So the width is chosen anew for every step, from past data only: the
text does not depend on it. Width 1 is plain decoding.

    tokens a step of width W   sum over requests of 1 + c_1 + c_1 c_2 + ... + c_1 ... c_(W-1)
    its cost                   seconds of (batch, W), measured at start and corrected while running

where c_k, kept per request, says how often draft k was right, given that those before it were.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forerun.core.request import Request
from forerun.scheduler.acceptance_stats import AcceptanceStats, tokens

OWN, ALL = 16.0, 32.0  # observations that a request's c_k goes back, and that of all of them,
ALL_STEPS = 2.0  # but never fewer steps than this
TIMED, FASTER = 0.1, 4.0  # weight of the newest step in a cost; more where it was much faster
PAUSE = 1.25  # a step that takes so many times what is expected: once, and it tells nothing
DOUBT = 1.02  # drafts must promise so much more than plain steps: what is expected is not certain
CLOSE = 1.1  # where they promise less than this, plain steps are timed now and then:
STALE = 50  # after so many without
PROBES = 0.0025  # share of the time that may go into drafts which do not seem to pay;
EAGER = 16.0  # up to so many times more while drafts paid of late
LEAST_LOSS = 0.1  # of a probe's time, whatever is expected


def verify_widths(full: int, flexible: bool) -> tuple[int, ...]:
    """The widths that steps can have: 1, the full one, and powers of two between them."""
    between = [1 << n for n in range(2, full.bit_length())] if flexible else []
    return (1, *(w for w in between if w <= 0.75 * full), *([full] if full > 1 else []))


class VerifyOutcome(NamedTuple):
    """Of a request's step: how many `drafts` were made for it, and how many agreed."""

    request: Request
    drafts: int
    accepted: int


class WidthPolicy(ABC):
    """Chooses the width of every step, and is told what came of it."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self.chosen: Counter[int] = Counter()  # steps of each width

    def choose(self, requests: Sequence[Request]) -> int:
        """The width of the next step for these requests."""
        wanted = 1 + max(r.params.draft_limit(self.widths[-1] - 1) for r in requests)
        width = self._choose(requests, bisect.bisect_left(self.widths, wanted)) if wanted > 1 else 1
        self.chosen[width] += 1
        return width

    @abstractmethod
    def _choose(self, requests: Sequence[Request], most: int) -> int:
        """One of the first `most` + 1 widths."""

    def learn(self, outcomes: Sequence[VerifyOutcome]) -> None:
        """What came of a step."""
        return None

    def timed(self, batch: int, width: int, seconds: float) -> None:
        """A step took so long."""
        return None

    def as_dict(self) -> dict[str, Any]:
        """What is decided by, and what was decided."""
        steps = {width: self.chosen[width] for width in self.widths}
        return {"adaptive": False, "steps_by_width": steps, "probes": 0}


class FixedWidth(WidthPolicy):
    """The full width, or the least that gives every request the drafts it takes."""

    def _choose(self, requests: Sequence[Request], most: int) -> int:
        return self.widths[most]


class AdaptiveWidth(WidthPolicy):
    """The width of the most expected tokens a second."""

    def __init__(
        self,
        widths: Sequence[int],
        costs: Mapping[int, Sequence[float]],
        depth: int | None = None,
    ) -> None:
        """`costs`: seconds of a step by batch size, one for every width; `depth`: drafts that can
        be accepted at most (a tree's longest path), if fewer than the full width has."""
        super().__init__(widths)
        self._depth = self.widths[-1] - 1 if depth is None else depth
        self._batches = sorted(costs)
        self._costs = [self._plausible(costs[batch]) for batch in self._batches]
        # (place among the batches, width) -> whether the last step there was far too slow
        self._slow: dict[tuple[int, int], bool] = {}
        self._rates = AcceptanceStats(self._depth, ALL)  # of all requests: where a new one starts
        self._means = self._rates.estimates()
        self._expected = tokens(self._means, self.widths)
        self._saved = 0.0  # seconds that probes may cost
        self._probes = 0
        self._eager = 1.0  # doubled by drafts that paid, halved by probes that did not
        self._paid = self._probing = False
        self._drafted = 0  # steps since one was plain for want of better

    # --- choosing -------------------------------------------------------------------------------

    def _choose(self, requests: Sequence[Request], most: int) -> int:
        costs = self.costs(len(requests))
        speeds = [self._yield(requests, i) / costs[i] for i in range(most + 1)]
        best = max(range(most + 1), key=speeds.__getitem__)
        if speeds[best] > DOUBT * speeds[0]:
            self._drafted += 1
            stale = self._drafted >= STALE and speeds[best] < CLOSE * speeds[0]
            if not stale:
                return self.widths[best]
        elif self._may_probe(costs, speeds):
            return self.widths[1]
        self._drafted = 0
        return 1

    def _may_probe(self, costs: Sequence[float], speeds: Sequence[float]) -> bool:
        """Plain steps tell nothing about drafts, and texts change: look now and then, with the
        narrowest drafts, as often as the saved time allows, and again where it paid."""
        self._saved += self._eager * PROBES * costs[0]
        lost = 1 - speeds[1] / speeds[0]  # over plain steps to as many tokens, as far as is known
        price = costs[1] * max(lost, LEAST_LOSS)
        if not self._paid and self._saved < price:
            return False
        self._saved = max(self._saved - price, 0.0)
        self._probes += 1
        self._paid, self._probing = False, True
        return True

    def _yield(self, requests: Sequence[Request], index: int) -> float:
        """Tokens that a step of this width is expected to bring."""
        total, width = 0.0, self.widths[index]
        for request in requests:
            params = request.params
            left = params.max_new_tokens - len(request.output) - len(request.pending)
            limit = min(params.draft_limit(width - 1) + 1, max(left, 1))
            total += min((request.expected or self._expected)[index], limit)
        return total

    def costs(self, batch: int) -> list[float]:
        """Seconds of a step for every width, on the line between the measured batch sizes."""
        at = bisect.bisect_left(self._batches, batch)
        if at == len(self._batches):
            return [cost * batch / self._batches[-1] for cost in self._costs[-1]]
        if len(rows := self._around(batch)) == 1:
            return rows[0]
        below, above = self._batches[at - 1 : at + 1]
        share = (batch - below) / (above - below)
        return [a + share * (b - a) for a, b in zip(*rows, strict=True)]

    def _plausible(self, measured: Sequence[float]) -> list[float]:
        """A pause while measuring must not make a width look so dear that it is never seen again:
        no wider step is cheaper, and W rows cost no more than W plain steps."""
        costs = list(measured)
        for i in reversed(range(len(costs) - 1)):
            costs[i] = min(costs[i], costs[i + 1])
        return [min(cost, width * costs[0]) for width, cost in zip(self.widths, costs, strict=True)]

    def _around(self, batch: int) -> list[list[float]]:
        """The measured rows that the costs of a batch size come from: one, or those beside it."""
        at = bisect.bisect_left(self._batches, batch)
        exact = at < len(self._batches) and self._batches[at] == batch
        return self._costs[max(at - (not exact), 0) : at + 1]

    def as_dict(self) -> dict[str, Any]:
        """Also the seconds of a step by batch size, one for every width, and the mean c_k."""
        costs = dict(zip(self._batches, map(list, self._costs), strict=True))
        own = {"adaptive": True, "probes": self._probes}
        return super().as_dict() | own | {"step_costs": costs, "accept_rates": list(self._means)}

    # --- learning -------------------------------------------------------------------------------

    def learn(self, outcomes: Sequence[VerifyOutcome]) -> None:
        judged = [VerifyOutcome(r, min(n, self._depth), right) for r, n, right in outcomes if n > 0]
        for request in {r for r, _, _ in outcomes} - {r for r, _, _ in judged}:
            if request.rates is not None:
                request.rates.wait()
        if not judged:
            self._rates.wait()
            return
        self._weigh(outcomes)
        self._rates.memory = max(ALL, ALL_STEPS * len(judged))
        for _, drafts, accepted in judged:
            self._rates.learn(drafts, accepted)
        self._means = self._rates.estimates()
        self._expected = tokens(self._means, self.widths)
        for request, drafts, accepted in judged:
            if request.rates is None:
                request.rates = AcceptanceStats(self._depth, OWN)
            request.rates.learn(drafts, accepted)
            request.expected = tokens(request.rates.estimates(self._means), self.widths)

    def _weigh(self, outcomes: Sequence[VerifyOutcome]) -> None:
        """Whether a step that drafted brought more than a plain one."""
        costs = self.costs(len(outcomes))
        cost = costs[bisect.bisect_left(self.widths, 1 + max(drafts for _, drafts, _ in outcomes))]
        made = sum(1 + accepted for _, _, accepted in outcomes)
        self._paid = made / cost > len(outcomes) / costs[0]
        if self._paid:
            self._eager = min(2 * self._eager, EAGER)
        elif self._probing:
            self._eager = max(self._eager / 2, 1.0)
        self._probing = False

    def timed(self, batch: int, width: int, seconds: float) -> None:
        i = self.widths.index(width)
        # What was measured during a pause of the machine is soon put right.
        ratio = min(max(seconds / self.costs(batch)[i], 0.5), 2.0)
        weight = max(TIMED, FASTER * (1 - ratio)) if ratio > 0.875 else 0.5
        if self._is_pause(batch, width, ratio):
            return
        for row in self._around(batch):
            row[i] *= 1 + weight * (ratio - 1)

    def _is_pause(self, batch: int, width: int, ratio: float) -> bool:
        """A step is dear where the one before it was much slower than expected, too."""
        place = bisect.bisect_left(self._batches, batch), width
        before, self._slow[place] = self._slow.get(place, False), ratio > PAUSE
        return self._slow[place] and not before
