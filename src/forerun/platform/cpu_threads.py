"""Chooses the number of intra-op threads for steps on a CPU.

A decode step of a small model consists of hundreds of operations of a few microseconds, each of
which ends at a barrier. On a quiet machine several threads are faster there, too; but a thread that
loses its core to another process delays every operation, and then one thread is. So such steps are
timed while they run (`thread_tuner.py`). Larger models spend most of the time on reading weights,
which is faster with all cores.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SMALL_WEIGHTS = 256 * 2**20  # bytes; of models below this, steps are timed
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPUS = Path("/sys/devices/system/cpu")


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
        current = _blocks.outside()
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


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Operations of the calling thread use `count` threads within the block."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    with _blocks.inside(before):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class _Blocks:
    """What the number of threads is outside of all blocks.

    A thread that begins while another is in a block has the number of that block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._outside = 0

    @contextmanager
    def inside(self, before: int) -> Iterator[None]:
        with self._lock:
            self._outside = before if self._open == 0 else self._outside
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1

    def outside(self) -> int:
        with self._lock:
            return self._outside if self._open else torch.get_num_threads()


_blocks = _Blocks()


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
