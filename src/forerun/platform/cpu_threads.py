"""Chooses the number of intra-op threads for steps on a CPU.

A decode step of a small model consists of hundreds of operations of a few microseconds, each of
which ends at a barrier. On a quiet machine several threads are faster there, too; but a thread that
loses its core to another process delays every operation, and then one thread is. So such steps are
timed while they run (`ThreadTuner`). Larger models spend most of the time on reading weights, which
is faster with all cores.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SMALL_WEIGHTS = 256 * 2**20  # bytes; of models below this, steps are timed
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPUS = Path("/sys/devices/system/cpu")


# Of a step's time on several threads over that on one: below which steps get several, and above
# which they get one again.
SEVERAL_PAY, ONE_PAYS = 0.9, 1.0
# Weights of a step's time among those before it.
ONE_WEIGHT, SEVERAL_WEIGHT, PROBE_WEIGHT = 1 / 8, 1 / 32, 1 / 4
LONGEST = 4.0  # times as long as on one thread: what a step on several counts at most
# Steps on several threads from one probe (on one thread) to the next. Those on one are probed
# sooner at first, and more and more rarely while several keep failing.
PROBE_INTERVAL, FIRST_PROBE, LAST_PROBE = 128, 8, 512
PROBED = 4  # steps of a probe on several threads; the first one finds the others asleep
SETTLED = 4  # steps of a kind in a row, after which it is timed on one thread if it never was


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """The number of intra-op threads, and the reason for it."""

    count: int  # at most, if tuned
    reason: str
    tuned: bool = False  # steps decide: one or several

    @classmethod
    def choose(cls, weight_bytes: int, fixed_order: bool) -> CpuThreads:
        """The user's setting; else all physical cores, or as many as small models are fastest with.

        Args:
            weight_bytes: size of the target's weights in memory.
            fixed_order: no bit depends on the number of threads. Else small models have one.
        """
        current = torch.get_num_threads()
        for name in VARIABLES:
            if os.environ.get(name):
                return cls(current, f"{name} is set")
        logical, physical = logical_cores(), _physical_cores()
        if current not in (logical, physical):  # torch starts with one of these
            return cls(current, "torch.set_num_threads was called")
        if weight_bytes >= SMALL_WEIGHTS:
            return cls(physical, "all physical cores")
        small = f"weights under {SMALL_WEIGHTS >> 20} MiB"
        if physical == 1 or not fixed_order:
            return cls(1, small)
        return cls(physical, f"{small}: one or several, whichever is faster", tuned=True)


class ThreadTuner:
    """One thread or several for the next step, by the times of those before it.

    Times are compared among steps of one kind: of the same batch, tokens and operations. Now and
    then a step, or some of them, are a probe: they run the other way.
    """

    def __init__(self, most: int) -> None:
        self.count = self.several = most  # of the next step; where that is not one
        self.ratio = 1.0  # of a step's time on several threads over that on one
        self._on_one: dict[Hashable, float] = {}  # seconds by kind
        self._kind: Hashable = None  # of the last step
        self._alike = 0  # steps of that kind in a row
        self._pay = True  # several do
        self._since = self._unprobed = 0  # steps since that changed, and since the last probe
        self._probe = 0  # steps of a probe that are still to run
        self._interval = FIRST_PROBE  # of probes while one thread is used

    def measure(self, seconds: Callable[[int], float]) -> None:
        """Compares 1, 2, 4, ... and `most` threads by what one step takes with each.

        Ends with the first number of threads that is slower than the one before it.
        """
        one = shortest = seconds(1)
        counts = [1 << n for n in range(1, self.several.bit_length())]
        for count in dict.fromkeys([*counts, self.several]):
            taken = seconds(count)
            if count > 2 and taken >= shortest:
                break
            shortest, self.several = taken, count
        self.ratio = shortest / one
        self._pay = self.ratio < SEVERAL_PAY
        self.count = self.several if self._pay else 1

    def record(self, kind: Hashable, seconds: float) -> None:
        """The time of one step, which ran on `count` threads."""
        self._alike = self._alike + 1 if kind == self._kind else 1
        self._kind = kind
        self._since += 1
        self._unprobed += 1
        before = self._on_one.get(kind)
        if self.count == 1:
            # Of a step that something held up, as much as twice the time.
            weight = PROBE_WEIGHT if self._pay else ONE_WEIGHT
            change = 0.0 if before is None else weight * min(seconds - before, before)
            self._on_one[kind] = seconds if before is None else before + change
        elif before is not None and self._probe < PROBED:
            weight = SEVERAL_WEIGHT if self._pay else PROBE_WEIGHT
            self.ratio += weight * (min(seconds / before, LONGEST) - self.ratio)
            self._switch(self.ratio < (ONE_PAYS if self._pay else SEVERAL_PAY))
        self._probe = self._probe - 1 if self._probe else self._due(kind)
        self.count = self.several if self._pay != bool(self._probe) else 1

    def _switch(self, pay: bool) -> None:
        if pay == self._pay:
            return
        if self._pay and self._since >= PROBE_INTERVAL:  # several were good for long
            self._interval = FIRST_PROBE
        self._pay, self._since, self._unprobed, self._probe = pay, 0, 0, 0

    def _due(self, kind: Hashable) -> int:
        """Steps of a probe that begins now."""
        if self._pay:
            unknown = kind not in self._on_one and self._alike >= SETTLED
            steps = int(unknown or self._unprobed >= PROBE_INTERVAL)
        else:
            steps = PROBED if self._unprobed >= self._interval else 0
            self._interval = min(2 * self._interval, LAST_PROBE) if steps else self._interval
        self._unprobed = 0 if steps else self._unprobed
        return steps


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Operations of the calling thread use `count` threads within the block."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_shares(count: int) -> list[tuple[int, ...]]:
    """The CPUs of this process in `count` parts, siblings of a core together.

    Parts are empty where there are fewer cores, or where the system does not say which they are.
    """
    cores: dict[str, list[int]] = {}
    for cpu in _usable():
        siblings = _read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or str(cpu), []).append(cpu)
    parts = list(cores.values())
    if len(parts) < count:
        return [()] * count
    bounds = [len(parts) * index // count for index in range(count + 1)]
    return [
        tuple(cpu for core in parts[begin:end] for cpu in core)
        for begin, end in itertools.pairwise(bounds)
    ]


def _usable() -> list[int]:
    """CPUs that this process may run on; empty if unknown."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return []


def logical_cores() -> int:
    return len(_usable()) or os.cpu_count() or 1


def _physical_cores() -> int:
    """Cores without SMT siblings; the logical cores if unknown."""
    cores = {_read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") for cpu in _usable()}
    return len(cores) if cores and "" not in cores else logical_cores()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
