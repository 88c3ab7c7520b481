"""How many tokens a ragged step verifies, and for how many requests it drafts. No torch.

A step of B requests drafts for D of them and verifies N tokens: one of each request, and the N - B
drafts of the D requests that are most likely to survive (`speculative/ragged/allocate.py`). It is
expected to commit B tokens and one for every draft times its survival, so

    throughput(D, N) = (B + the N - B largest survivals of D requests) / (draft(D) + verify(B, N))

and the best of all D and N is taken. Plain decoding is D = 0 and N = B; the full width, or any one
width for all requests, is never better, since the same N tokens are divided as well or better.

Which D requests? At a price p of a verified token, in tokens, the best that a request can add is
the sum of its survivals over p, less p for each. The D requests with the largest sums at some price
are tried, for several prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.core.widths import DRAFTING_BATCH

PRICES = (0.0, 0.03, 0.06, 0.1, 0.15, 0.22, 0.3, 0.4, 0.5, 0.65, 0.8)  # tokens, of a verified one

Survivals = NDArray[np.float64]


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of the steps of one batch, drafts and verify pass apart."""

    # N of each verify pass there is, not falling; the first: B, plain decoding; the others: more.
    tokens: Sequence[int]
    verify: Sequence[float]  # of each, with everything but the drafts
    drafting: Sequence[int]  # D >= 1, ascending: for how many requests a step can draft
    draft: Sequence[float]  # of each


@dataclass(frozen=True)
class Budget:
    """A step, and what it promises."""

    tokens: int  # N
    drafting: int  # D
    # Indices of the requests; the first D of them draft.
    order: tuple[int, ...]
    expected: float  # tokens that it commits
    seconds: float
    most: int  # W: tokens of one request, for which drafts are made

    @property
    def throughput(self) -> float:
        return self.expected / self.seconds


def drafting_options(batch: int, parts: int) -> list[int]:
    """Numbers of requests, of so many, that a step may draft for: parts of them, and all."""
    if batch < DRAFTING_BATCH:
        return [batch]
    step = batch // parts
    return [*range(step, batch - step + 1, step), batch]


def budgets(survival: Survivals, times: BatchTimes) -> list[Budget]:
    """The step with the highest expected throughput for each verify pass; first plain decoding.

    Args:
        survival: [B, K], not rising along a row; 0 where a request takes no draft.
        times: of a batch of B requests.
    """
    batch, num_drafts = survival.shape
    plain = Budget(times.tokens[0], 0, tuple(range(batch)), float(batch), times.verify[0], 1)
    verify, wanted = np.asarray(times.verify[1:]), np.asarray(times.tokens[1:]) - batch
    if not len(wanted):
        return [plain]
    options = _candidates(survival, times)
    gains = [_gains(survival[order[:drafting]]) for drafting, _, order in options]
    # [options, passes]
    expected = np.stack([batch + each[np.minimum(wanted, len(each)) - 1] for each in gains])
    seconds = verify + np.asarray([cost for _, cost, _ in options])[:, None]
    best = np.argmax(expected / seconds, 0)
    out = [plain]
    for i, (at, total) in enumerate(zip(best.tolist(), times.tokens[1:], strict=True)):
        drafting, _, order = options[at]
        found = float(expected[at, i]), float(seconds[at, i])
        out.append(Budget(total, drafting, tuple(order.tolist()), *found, 1 + num_drafts))
    return out


def _gains(survival: Survivals) -> Survivals:
    """What the best n drafts are expected to add, for n = 1 to all of them."""
    gains: Survivals = np.cumsum(np.sort(survival, axis=None)[::-1])
    return gains


def _candidates(
    survival: Survivals, times: BatchTimes
) -> list[tuple[int, float, NDArray[np.int64]]]:
    """Each number of drafting requests, its seconds, and the requests in an order."""
    batch = len(survival)
    if times.drafting[0] >= batch:
        return [(times.drafting[0], times.draft[0], np.arange(batch))]
    above = np.maximum(survival[None] - np.asarray(PRICES)[:, None, None], 0.0)
    # [prices, B]; of requests with nothing above a price, those with more below it go first.
    values = above.sum(-1) + 1e-9 * survival.sum(-1)
    orders = np.argsort(-values, axis=1, kind="stable")
    # At each price, what the requests of an order add; a price is right where they add most.
    counts = np.take_along_axis((above > 0).sum(-1), orders, 1).cumsum(1)
    added = np.take_along_axis(values, orders, 1).cumsum(1)
    added += np.asarray(PRICES)[:, None] * counts
    passes, seconds = np.asarray(times.tokens), np.asarray(times.verify)
    padded = np.clip(np.searchsorted(passes, batch + counts), 1, len(passes) - 1)
    fits = batch + counts <= passes[-1]
    out = []
    for drafting, cost in zip(times.drafting, times.draft, strict=True):
        at = min(drafting, batch) - 1
        rate = (batch + added[:, at]) / (seconds[padded[:, at]] + cost)
        price = int(np.argmax(np.where(fits[:, at], rate, rate * 0.5)))
        out.append((min(drafting, batch), cost, orders[price]))
    return out
