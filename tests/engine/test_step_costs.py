"""Step costs where other processes hold up some of the measured steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forerun.executor.step.costs import CAPTURED, EAGER, MeasurementBudget, shortest


def steps(*seconds: float) -> Iterator[float]:
    return iter(seconds)


def test_short_steps_are_repeated_until_one_is_not_held_up() -> None:
    assert (
        shortest(steps(0.009, 0.007, 0.008, 0.002, 0.002, 0.002, 0.002, 0.002).__next__, EAGER)
        == 0.002
    )


@pytest.mark.parametrize("budget", [EAGER, CAPTURED])
def test_long_steps_are_repeated_as_little_as_possible(budget: MeasurementBudget) -> None:
    times = steps(*[0.3] * budget.repetitions)
    assert shortest(times.__next__, budget) == 0.3  # StopIteration if it took another
