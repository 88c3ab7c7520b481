"""One thread or several, by the times of steps: against steps whose times are known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from forerun.platform.thread_tuner import PROBE_INTERVAL, ThreadTuner

ONE, STALL = 1e-3, 4e-3  # seconds: of a step on one thread, and of one that lost a core


class Machine:
    """Steps on one thread and on two, some of which lose a core for a while."""

    def __init__(self, ratio: float, stalls: float = 0.0) -> None:
        """`ratio`: of the times on two and on one; `stalls`: how often two threads are held up."""
        self.ratio, self.stalls, self._random = ratio, stalls, random.Random(0)
        self.seconds = 0.0  # of all steps

    def step(self, count: int, length: float) -> float:
        taken = ONE * length * (1.0 if count == 1 else self.ratio)
        taken *= self._random.uniform(0.95, 1.1)
        if count > 1 and self._random.random() < self.stalls:
            taken += STALL
        self.seconds += taken
        return taken


def run(
    tuner: ThreadTuner,
    machine: Machine,
    steps: int,
    kind_of: Callable[[int], tuple[object, float]] = lambda at: ("plain", 1.0),
) -> Counter[int]:
    """How many steps ran on how many threads; `kind_of` gives the kind and length of each."""
    counts: Counter[int] = Counter()
    for at in range(steps):
        kind, length = kind_of(at)
        counts[tuner.count] += 1
        tuner.record(kind, machine.step(tuner.count, length))
    return counts


def test_a_quiet_machine_has_several_but_for_probes() -> None:
    tuner, machine = ThreadTuner(2), Machine(0.65)
    counts = run(tuner, machine, 5000)
    assert counts[1] < 2 + 5000 / PROBE_INTERVAL
    assert tuner.ratio == pytest.approx(0.65, abs=0.05)


@pytest.mark.parametrize(("ratio", "stalls"), [(0.65, 0.3), (1.3, 0.0), (1.02, 0.0)])
def test_where_several_are_slower_there_is_one(ratio: float, stalls: float) -> None:
    tuner, machine = ThreadTuner(2), Machine(ratio, stalls)
    run(tuner, machine, 400)
    counts = run(tuner, machine, 10_000)
    assert counts[1] > 9000
    assert machine.seconds < 1.1 * 10_400 * ONE * 1.025


def test_it_follows_the_machine() -> None:
    tuner, machine = ThreadTuner(2), Machine(0.65)
    for stalls, at_most in ((0.0, 300), (0.3, 300), (0.0, 1500), (0.3, 300)):
        machine.stalls = stalls
        run(tuner, machine, at_most)
        counts = run(tuner, machine, 1000)
        assert counts[1 if stalls else 2] > 850, (stalls, counts)


def test_rare_stalls_do_not_matter() -> None:
    tuner, machine = ThreadTuner(2), Machine(0.65, stalls=0.01)
    assert run(tuner, machine, 5000)[2] > 4800


def test_times_of_kinds_are_compared_with_their_own() -> None:
    """A wide step takes four times as long as a plain one, on one thread and on two."""
    tuner, machine = ThreadTuner(2), Machine(0.65)
    kinds = ("plain", 1.0), ("wide", 4.0)
    counts = run(tuner, machine, 4000, lambda at: kinds[at // 50 % 2])
    assert counts[1] < 4 + 4000 / PROBE_INTERVAL
    assert tuner.ratio == pytest.approx(0.65, abs=0.05)


def test_steps_that_grow_longer() -> None:
    """Contexts grow: each step takes longer than the one before."""
    tuner, machine = ThreadTuner(2), Machine(0.75)
    counts = run(tuner, machine, 4000, lambda at: ("plain", 1 + at / 2000))
    assert counts[2] > 3900


@pytest.mark.parametrize(
    ("taken", "most", "several", "count"),
    [
        ({1: 1.0, 2: 0.6}, 2, 2, 2),
        ({1: 1.0, 2: 0.95}, 2, 2, 1),
        ({1: 1.0, 2: 0.7, 4: 0.5, 6: 0.8}, 6, 4, 4),
        ({1: 1.0, 2: 0.7, 4: 0.6, 6: 0.5}, 6, 6, 6),
        ({1: 1.0, 2: 1.2, 3: 1.1}, 3, 3, 1),
        ({1: 1.0, 2: 0.7, 4: 0.8}, 64, 2, 2),  # no more are tried
    ],
)
def test_counts_are_compared_at_start(
    taken: dict[int, float], most: int, several: int, count: int
) -> None:
    tuner = ThreadTuner(most)
    seconds: Callable[[int], float] = taken.__getitem__
    tuner.measure(seconds)
    assert (tuner.several, tuner.count) == (several, count)
    assert tuner.ratio == taken[several]
