"""Threads that compute masks beside a step, so that no grammar can hold up a batch.

xgrammar releases the interpreter's lock while it computes a mask, and nothing can interrupt it. A
step's masks are computed by one thread, which the step waits for. If a single request takes longer
than `PATIENCE`, the step goes on without it. That thread is then left alone until it has finished,
at the lowest priority, and the next masks get a new one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

PATIENCE = 0.02  # seconds for the masks of one request in one step
LOWEST = 19  # niceness of threads that no step waits for


class MaskThreads:
    """The thread of the step's masks, and one for every grammar that is computed beside steps."""

    def __init__(self) -> None:
        self._lane: _Lane | None = None

    def run(self, task: Callable[[], None]) -> Future[None]:
        """Runs `task` in the thread that steps wait for."""
        if self._lane is None:
            self._lane = _Lane()
        return self._lane.submit(task)

    def leave(self) -> None:
        """The running task takes too long: later ones get another thread."""
        if self._lane is not None:
            self._lane.leave()
        self._lane = None

    @staticmethod
    def run_beside(task: Callable[[], None]) -> Future[None]:
        """Runs `task` in a thread of its own, at the lowest priority."""
        lane = _Lane(patient=True)
        future = lane.submit(task)
        lane.leave()
        return future


class _Lane:
    """A daemon thread that runs tasks in order until it is left."""

    def __init__(self, patient: bool = False) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._patient = patient
        self._thread = threading.Thread(target=self._run, name="forerun-masks", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def leave(self) -> None:
        """The thread ends after its tasks."""
        if not self._patient and self._thread.native_id is not None:
            lower_priority(self._thread.native_id)
        self._tasks.put(None)

    def _run(self) -> None:
        if self._patient:
            lower_priority(threading.get_native_id())
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                task()
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001  raised by whoever waits
                future.set_exception(error)


def lower_priority(thread: int, niceness: int = LOWEST) -> None:
    """Gives a thread, by its native id, a low priority where threads have one (Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
