"""Processes in which costly grammars are compiled first: one that does not end is ended there."""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
from typing import TYPE_CHECKING

from forerun.core.errors import BusyError, RequestError
from forerun.grammar import compile_process
from forerun.grammar.compile_process import MAX_MEMORY, Job
from forerun.platform.limited_process import (
    LimitedProcess,
    ProcessEndedError,
    ProcessTimeoutError,
)

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

_open: set[Trials] = set()  # with processes


class Trials:
    """Processes, as many as are needed at once; started with the first costly grammar.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # With the vocabulary that each has.
        self._idle: list[tuple[LimitedProcess, TokenizerInfo | None]] = []

    def run(self, job: Job, info: TokenizerInfo, cpu_seconds: float, seconds: float) -> None:
        """Compiles in another process.

        Args:
            cpu_seconds: CPU time that it may take.
            seconds: the time.

        Raises:
            RequestError: it takes too much CPU time or memory.
            BusyError: it takes too long otherwise.
        """
        message = {"job": job.to_json(), "seconds": max(1, round(cpu_seconds))}
        try:
            process, known = self._process()
            if known is not info:
                message["info"] = info.serialize_json()
            reason = process.ask(json.dumps(message).encode(), seconds).decode()
        except ProcessTimeoutError:
            raise BusyError(
                f"Compiling the grammar took longer than {seconds:g} s; try again later."
            ) from None
        except ProcessEndedError as error:
            raise _refusal(error, cpu_seconds) from None
        with self._lock:
            self._idle.append((process, info))
        if reason:
            raise RequestError(
                f"Compiling the grammar takes more than {MAX_MEMORY >> 20} MiB; simplify it."
            )

    def close(self) -> None:
        """Ends the processes that do nothing; others end with this process."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process, _ in idle:
            process.close()
        _open.discard(self)

    def _process(self) -> tuple[LimitedProcess, TokenizerInfo | None]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        _open.add(self)
        return LimitedProcess(compile_process.__file__), None

    def forget(self) -> None:
        """Leaves the processes to who has started them."""
        self._lock, self._idle = threading.Lock(), []


def _refusal(error: ProcessEndedError, cpu_seconds: float) -> RequestError:
    if error.code == -signal.SIGXCPU:
        return RequestError(
            f"Compiling the grammar takes longer than {cpu_seconds:g} s; simplify it."
        )
    return RequestError(f"The grammar cannot be compiled: {error}; simplify it.")


def _close_all() -> None:
    for each in list(_open):
        each.close()


def _after_fork() -> None:
    """A child starts processes of its own; those of its parent are in use there."""
    for each in list(_open):
        each.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
