"""Grammars that are compiled while the engine steps."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from forerun.core.errors import RequestError
from forerun.core.executor import Executor
from forerun.server.messages import Compile, Reply

log = logging.getLogger("forerun")
# The executor compiles fewer at a time, and answers at once for grammars that it knows.
THREADS = 32


class Compilations:
    """Each in a thread. All methods belong to the thread that steps the engine."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="forerun-grammar")
        self._running: dict[Future[None], int] = {}

    def __bool__(self) -> bool:
        """Whether some are not answered yet."""
        return bool(self._running)

    def start(self, message: Compile) -> None:
        future = self._pool.submit(self._executor.compile_grammar, message.grammar)
        self._running[future] = message.number

    def replies(self) -> list[Reply]:
        """Of those that have ended."""
        ended = [future for future in self._running if future.done()]
        return [_reply(future, self._running.pop(future)) for future in ended]

    def wait(self, seconds: float) -> None:
        """Until one ends."""
        wait(self._running, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _reply(future: Future[None], number: int) -> Reply:
    error = future.exception()
    if error is None:
        return Reply(number, {})
    if isinstance(error, RequestError):
        return Reply(number, None, str(error))
    log.error("Compiling a grammar failed.", exc_info=error)
    reason = f"{type(error).__name__}: {error}"
    return Reply(number, None, f"The grammar cannot be compiled: {reason}")
