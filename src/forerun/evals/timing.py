"""Timing on noisy machines: warm up, interleave, report the median."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from forerun import LLM

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """The result of one run, and its wall-clock seconds."""

    seconds: float
    value: T


def interleaved(
    runs: Mapping[str, Callable[[], T]],
    repetitions: int,
    *,
    before: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[Timed[T]]]:
    """Every run once, then every run again, ...: a slow phase of the machine affects all of them.

    `before` is called before each run and is not timed (it flushes caches). Every other round goes
    through the runs backwards, so that none always follows the same one.
    """
    timed: dict[str, list[Timed[T]]] = {name: [] for name in runs}
    for repetition in range(repetitions):
        names = list(runs)
        for name in names if repetition % 2 == 0 else reversed(names):
            before()
            begin = clock()
            value = runs[name]()
            timed[name].append(Timed(clock() - begin, value))
    return timed


def flush_caches(*llms: LLM) -> None:
    """Empties the prefix caches of idle engines, so that no run profits from an earlier one."""
    for llm in llms:
        llm.engine.flush_cache()


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation, as numpy's default. `values` must not be empty."""
    if not values:
        raise ValueError("quantile of no values")
    ranked = sorted(values)
    at = q * (len(ranked) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)
