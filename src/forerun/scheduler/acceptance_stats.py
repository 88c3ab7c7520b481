"""What is known of acceptance: c_k = how often draft k is right, given that those before it were.

A mean over few observations says little, and draft k is judged only where all before it agreed. So
every mean is taken together with a guess, worth `GUESS` observations: of a request, what is known
of all requests; of all requests, what is known of draft k - 1. The latter only bridges what was
never seen: it is weighed against all there ever was, not against what a mean goes back. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

PRIOR = 0.8  # c_1 before anything is known: try
GUESS = 4.0  # observations that a guess is worth
FADE = 0.995  # of what is known, that still holds a step later


class AcceptanceStats:
    """Running means, the older the lighter."""

    def __init__(self, drafts: int, memory: float) -> None:
        """`memory`: observations that a mean goes back at most."""
        self.memory = memory
        self._means = [0.0] * drafts
        self._seen = [0.0] * drafts  # observations behind each mean
        self._ever = [0.0] * drafts  # and all there were
        self._age = 0  # steps since the last observation

    def wait(self) -> None:
        """A step went by without drafts: texts change."""
        self._age += 1

    def learn(self, drafts: int, accepted: int) -> None:
        """`accepted` of `drafts` were right."""
        if self._age:
            fade = FADE**self._age
            self._seen = [seen * fade for seen in self._seen]
            self._age = 0
        for k in range(min(accepted, drafts)):
            self._observe(k, 1.0)
        if accepted < drafts:
            self._observe(accepted, 0.0)
            return
        for k in range(drafts, len(self._seen)):  # what is known of those behind grows old
            self._seen[k] *= 1 - 1 / self.memory
            self._ever[k] = min(self._ever[k], self.memory) * (1 - 1 / self.memory)

    def _observe(self, k: int, right: float) -> None:
        seen = min(self._seen[k] + 1, self.memory)
        self._means[k] += (right - self._means[k]) / seen
        self._seen[k] = seen
        self._ever[k] += 1

    def estimates(self, of_all: Sequence[float] | None = None) -> list[float]:
        """c_1, c_2, ...; `of_all`: the same of all requests."""
        out, before = [], PRIOR
        behind = self._ever if of_all is None else self._seen
        for k, (mean, weight) in enumerate(zip(self._means, behind, strict=True)):
            guess = before if of_all is None else of_all[k]
            before = (weight * mean + GUESS * guess) / (weight + GUESS)
            out.append(before)
        return out


def tokens(rates: Sequence[float], widths: Sequence[int]) -> tuple[float, ...]:
    """Tokens that a step of each width brings: 1 + c_1 + c_1 c_2 + ... + c_1 ... c_(W-1), as far
    as there are rates."""
    sums, product, total = [1.0], 1.0, 1.0
    for rate in rates:
        product *= rate
        total += product
        sums.append(total)
    return tuple(sums[min(width, len(sums)) - 1] for width in widths)
