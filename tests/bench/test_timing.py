"""Order and clock of interleaved runs; quantiles against numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.evals.timing import interleaved, median, quantile

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(numbers, st.floats(0, 1))
def test_quantile_is_numpys(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), abs=1e-6)


@given(numbers)
def test_median_is_numpys(values: list[float]) -> None:
    assert median(values) == pytest.approx(float(np.median(values)), abs=1e-6)


def test_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_runs_take_turns_and_only_they_are_timed() -> None:
    ticks = itertools.count()
    log: list[str] = []

    def before() -> None:
        log.append("flush")
        for _ in range(100):  # time that must not count
            next(ticks)

    def run(name: str, ticks_needed: int) -> str:
        log.append(name)
        for _ in range(ticks_needed):
            next(ticks)
        return name

    timed = interleaved(
        {"a": lambda: run("a", 5), "b": lambda: run("b", 9)},
        3,
        before=before,
        clock=lambda: float(next(ticks)),
    )
    assert [entry for entry in log if entry != "flush"] == ["a", "b", "b", "a", "a", "b"]
    assert log[::2] == ["flush"] * 6
    # The clock's own second reading is a tick too.
    assert [t.seconds for t in timed["a"]] == [6.0] * 3
    assert [t.seconds for t in timed["b"]] == [10.0] * 3
    assert {t.value for t in timed["a"]} == {"a"}
