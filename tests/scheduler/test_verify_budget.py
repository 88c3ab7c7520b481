"""The budget of a ragged step, against every step there is."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.scheduler.verify_budget import (
    BatchTimes,
    Budget,
    Survivals,
    budgets,
    drafting_options,
)
from tests.property_examples import examples

RATES = st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]) | st.floats(0, 1)
SETTINGS = examples(150)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Survivals, BatchTimes]:
    """Survivals of up to 6 requests with up to 4 drafts, and times that rise with the work."""
    batch, count = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rates = draw(st.lists(RATES, min_size=batch * count, max_size=batch * count))
    survival = np.cumprod(np.array(rates).reshape(batch, count), axis=1)
    largest = batch * (count + 1)
    between = draw(st.sets(st.integers(batch + 1, largest), max_size=4))
    tokens = sorted({batch, largest, *between})
    steps = st.floats(0, 1)
    base = draw(st.floats(0.5, 4))
    token = draw(st.floats(0.0, 0.5))
    verify = [base + token * n for n in tokens]
    drafting = list(range(1, batch + 1))
    fixed, each = draw(steps), draw(steps)
    return survival, BatchTimes(tokens, verify, drafting, [fixed + each * d for d in drafting])


def best_budget(survival: Survivals, times: BatchTimes) -> Budget:
    """The best step with drafts."""
    return max(budgets(survival, times)[1:], key=lambda each: each.throughput)


def best_of_all(survival: Survivals, times: BatchTimes) -> float:
    """The highest throughput over all sets of drafting requests and all verify passes."""
    batch, best = len(survival), 0.0
    for drafting, cost in zip(times.drafting, times.draft, strict=True):
        for chosen in combinations(range(batch), drafting):
            gains = np.cumsum(np.sort(survival[list(chosen)], axis=None)[::-1])
            for tokens, seconds in zip(times.tokens[1:], times.verify[1:], strict=True):
                taken = min(tokens - batch, len(gains))
                best = max(best, (batch + gains[taken - 1]) / (seconds + cost))
    return best


@SETTINGS
@given(case=cases())
def test_no_step_is_much_better(case: tuple[Survivals, BatchTimes]) -> None:
    """Of few requests which of them draft may be missed by a price between two that are tried."""
    survival, times = case
    got = best_budget(survival, times)
    assert got.throughput >= 0.93 * best_of_all(survival, times)


@SETTINGS
@given(case=cases())
def test_no_step_is_better_where_all_requests_draft(case: tuple[Survivals, BatchTimes]) -> None:
    survival, times = case
    everyone = BatchTimes(times.tokens, times.verify, times.drafting[-1:], times.draft[-1:])
    got = best_budget(survival, everyone)
    assert got.throughput == pytest.approx(best_of_all(survival, everyone), rel=1e-12)


@SETTINGS
@given(case=cases())
def test_a_budget_is_a_step_there_is_and_promises_what_it_says(
    case: tuple[Survivals, BatchTimes],
) -> None:
    survival, times = case
    batch = len(survival)
    found = budgets(survival, times)
    assert [each.tokens for each in found] == times.tokens
    for got, seconds in zip(found[1:], times.verify[1:], strict=True):
        assert sorted(got.order) == list(range(batch))
        which = times.drafting.index(got.drafting)
        assert got.seconds == pytest.approx(seconds + times.draft[which])
        drafts = np.sort(survival[list(got.order[: got.drafting])], axis=None)[::-1]
        assert got.expected == pytest.approx(batch + drafts[: got.tokens - batch].sum())


def test_requests_that_pay_draft() -> None:
    """Half of the requests are easy; drafting for the others costs more than it gives."""
    easy, hard = 0.95 ** np.arange(1, 8), 0.1 ** np.arange(1, 8)
    survival = np.stack([hard, easy] * 16)
    tokens = [32 * width for width in range(1, 9)]
    options = drafting_options(32, 8)
    times = BatchTimes(tokens, [8 + 0.02 * n for n in tokens], options, [0.1 * d for d in options])
    got = best_budget(survival, times)
    assert got.drafting == 16 and all(index % 2 for index in got.order[:16])
    plain = budgets(survival, times)[0]
    assert (plain.tokens, plain.drafting, plain.expected, plain.seconds) == (32, 0, 32, 8.64)
    assert got.throughput > plain.throughput


def test_options() -> None:
    assert drafting_options(1, 8) == [1] and drafting_options(31, 2) == [31]
    assert drafting_options(64, 8) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert drafting_options(65, 2) == [32, 65] and drafting_options(32, 2) == [16, 32]
