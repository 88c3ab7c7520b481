"""Grammars that are compiled while the engine steps."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from forerun.core.errors import BusyError, RequestError
from forerun.core.executor import Executor
from forerun.core.grammar import Grammar
from forerun.server.engines.messages import Compile, Reply

log = logging.getLogger("forerun")
# The executor compiles fewer at a time, lets a few more wait, and answers at once for grammars
# that it knows.
THREADS = 64


class Compilations:
    """Each grammar in a thread. All methods belong to the thread that steps the engine."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="forerun-grammar")
        self._running: dict[Grammar, tuple[Future[None], list[int]]] = {}

    def __bool__(self) -> bool:
        """Whether some are not answered yet."""
        return bool(self._running)

    def start(self, message: Compile) -> None:
        running = self._running.get(message.grammar)
        if running is None:
            compile_grammar = self._executor.compile_grammar
            future = self._pool.submit(compile_grammar, message.grammar, message.client)
            running = self._running[message.grammar] = (future, [])
        running[1].append(message.number)

    def replies(self) -> list[Reply]:
        """Returns replies of those that have ended."""
        ended = [grammar for grammar, (future, _) in self._running.items() if future.done()]
        answered = [self._running.pop(grammar) for grammar in ended]
        return [_reply(future, number) for future, numbers in answered for number in numbers]

    def wait(self, seconds: float) -> None:
        """Waits until one ends."""
        wait([future for future, _ in self._running.values()], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _reply(future: Future[None], number: int) -> Reply:
    error = future.exception()
    if error is None:
        return Reply(number, {})
    if isinstance(error, BusyError):
        return Reply(number, None, str(error), busy=True)
    if isinstance(error, RequestError):
        return Reply(number, None, str(error))
    log.error("Compiling a grammar failed.", exc_info=error)
    reason = f"{type(error).__name__}: {error}"
    return Reply(number, None, f"The grammar cannot be compiled: {reason}")
