"""Questions that take long: threads answer them while the engine steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from forerun.core.errors import BusyError, RequestError
from forerun.server.engines.messages import Reply

log = logging.getLogger("forerun")
# The executor compiles fewer grammars at a time, lets a few more wait, and answers at once for
# those that it knows.
THREADS = 64


class SlowAnswers:
    """Each question in a thread. All methods belong to the thread that steps the engine."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="forerun-answer")
        self._running: dict[Hashable, tuple[Future[None], list[int]]] = {}

    def __bool__(self) -> bool:
        """Whether some are not answered yet."""
        return bool(self._running)

    def start(self, number: int, question: Hashable, action: Callable[[], None]) -> None:
        """Answers message `number` once `action` has returned.

        Args:
            question: what is asked; while it is being answered, equal ones get the same answer.
        """
        running = self._running.get(question)
        if running is None:
            running = self._running[question] = (self._pool.submit(action), [])
        running[1].append(number)

    def replies(self) -> list[Reply]:
        """Returns replies of those that have ended."""
        ended = [question for question, (future, _) in self._running.items() if future.done()]
        answered = [self._running.pop(question) for question in ended]
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
    log.error("A question to the engine failed.", exc_info=error)
    return Reply(number, None, f"The engine cannot do that: {type(error).__name__}: {error}")
