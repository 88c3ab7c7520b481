"""What crosses the boundary of a rank's process: a tag byte, and a body in MessagePack.

Grammars are compiled in the process too; they have a pipe and a thread of their own, so that steps
do not wait for them. That thread also says whether a profile is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from forerun.core.errors import BusyError, ConfigError, ExecutorError, RequestError
from forerun.core.plan import StepResult

PLAN, DISABLE_DRAFTS, CLOSE = b"p", b"d", b"c"  # to a rank
SIMULATE = b"a"  # to a rank, with mean accept lengths
START_PROFILE, STOP_PROFILE = b"s", b"t"  # to a rank; the first one with `ProfileParams`
INFO, RESULT, REFUSED, FAILED, BUSY = b"i", b"r", b"x", b"f", b"w"  # from a rank
# To its thread for grammars: `prepare_grammars`, and `check_profile` with a name. No grammar begins
# like that.
PREPARE, CHECK_PROFILE = b"", b"?"
COMPILED = b"g"  # from its thread for grammars, or REFUSED, BUSY or FAILED
COMPILING_SECONDS = 30.0  # for which a grammar waits for others
CLOSE_SECONDS = 10.0  # until a process that does not exit is killed


@dataclass(eq=False)
class RemoteStep:
    """A step that other processes run."""

    wait: Callable[[RemoteStep], StepResult]
    value: StepResult | None = field(default=None)

    def result(self) -> StepResult:
        """
        Raises:
            ExecutorError: the step failed, or a process ended.
        """
        return self.wait(self)


def message_body(message: bytes, expected: bytes, who: str) -> bytes:
    """
    Raises:
        ConfigError: the settings are invalid.
        ExecutorError: it is another message; `who` failed.
    """
    tag, body = message[:1], message[1:]
    if tag == REFUSED:
        raise ConfigError(body.decode())
    if tag != expected:
        raise ExecutorError(f"{who} failed: {body.decode(errors='replace')}")
    return body


@contextmanager
def waiting_for(compiling: threading.Lock) -> Iterator[None]:
    """The block asks for a grammar; one at a time does.

    Raises:
        BusyError: others take too long.
    """
    if not compiling.acquire(timeout=COMPILING_SECONDS):
        raise BusyError("Other grammars are taking too long to compile; try again later.")
    try:
        yield
    finally:
        compiling.release()


def compiled_body(answer: bytes, who: str) -> bytes:
    """
    Raises:
        RequestError: the grammar is invalid.
        BusyError: it cannot be compiled now.
        ExecutorError: `who` failed.
    """
    if answer[:1] == BUSY:
        raise BusyError(answer[1:].decode())
    if answer[:1] == REFUSED:
        raise RequestError(answer[1:].decode())
    if answer[:1] != COMPILED:
        raise ExecutorError(f"{who} failed: {answer[1:].decode()}")
    return answer[1:]
