"""Running estimates of acceptance rates, from which expected tokens per step follow. No torch.

c_k is the probability that draft k is accepted, given that drafts 1 to k - 1 were. A mean of few
observations is unreliable, and draft k is only tested where all drafts before it were accepted. So
every mean is blended with a prior that counts as `PRIOR_WEIGHT` observations:

    estimate_k = (n_k * mean_k + PRIOR_WEIGHT * prior_k) / (n_k + PRIOR_WEIGHT)

The prior of one request's c_k is the estimate over all requests. The prior of the estimate over
all requests is its estimate of c_(k-1), and n_k then counts all observations rather than those of
the window, so that the prior only matters for positions that were hardly ever tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

INITIAL_RATE = 0.8  # prior of c_1; high, so that drafts are tried
PRIOR_WEIGHT = 4.0  # observations that a prior counts as
DECAY = 0.995  # per step without drafts: weight that past observations keep


class AcceptanceStats:
    """Exponential moving averages of c_1, c_2, ... of one request or of all requests."""

    def __init__(self, max_drafts: int, window: float) -> None:
        """`window`: observations that a moving average covers at most."""
        self.window = window
        self._means = [0.0] * max_drafts
        self._counts = [0.0] * max_drafts  # observations in the window of each mean
        self._totals = [0.0] * max_drafts  # all observations
        self._plain_steps = 0  # since the last observation

    def record_plain_step(self) -> None:
        """A step without drafts: past observations lose weight, because texts change."""
        self._plain_steps += 1

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """A verify step accepted the first `num_accepted` of `num_drafts` drafts."""
        if self._plain_steps:
            decay = DECAY**self._plain_steps
            self._counts = [count * decay for count in self._counts]
            self._plain_steps = 0
        means, counts, totals, window = self._means, self._counts, self._totals, self.window
        for k in range(min(num_accepted + 1, num_drafts)):  # up to the first rejected draft
            counts[k] = min(counts[k] + 1, window)
            means[k] += ((k < num_accepted) - means[k]) / counts[k]
            totals[k] += 1
        if num_accepted < num_drafts:
            return
        # All drafts were accepted: what is known of later positions becomes outdated.
        for k in range(num_drafts, len(counts)):
            counts[k] *= 1 - 1 / window
            totals[k] = min(totals[k], window) * (1 - 1 / window)

    def estimates(self, priors: Sequence[float] | None = None) -> list[float]:
        """c_1, c_2, ...

        Args:
            priors: the estimates over all requests; None: these are the estimates over all.
        """
        if priors is not None:
            return [
                (count * mean + PRIOR_WEIGHT * prior) / (count + PRIOR_WEIGHT)
                for mean, count, prior in zip(self._means, self._counts, priors, strict=True)
            ]
        rates, prior = [], INITIAL_RATE
        for mean, count in zip(self._means, self._totals, strict=True):
            prior = (count * mean + PRIOR_WEIGHT * prior) / (count + PRIOR_WEIGHT)
            rates.append(prior)
        return rates


def expected_tokens(rates: Sequence[float], widths: Sequence[int]) -> tuple[float, ...]:
    """Expected tokens of a step for each width W: 1 + c_1 + c_1 c_2 + ... + c_1 ... c_(W-1).

    Drafts beyond the last of `rates` add nothing.
    """
    sums = list(accumulate(accumulate(rates, mul), initial=1.0))
    return tuple(sums[min(width, len(sums)) - 1] for width in widths)
