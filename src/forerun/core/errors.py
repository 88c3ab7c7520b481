"""Exceptions of Forerun. Messages for users say what is wrong and how to fix it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

MAX_WORD = 200  # characters; the time of `nearest` grows with them
MAX_DIVISOR = 1024  # that `divisors` looks for


class ForerunError(Exception):
    """Base class of all errors that Forerun raises."""


class ConfigError(ForerunError, ValueError):
    """An invalid setting, checkpoint or combination, found at start. Exit code 2."""


class OtherDraftError(ConfigError):
    """A draft's files are not of the kind that was expected; another algorithm may read them."""


class RequestError(ForerunError, ValueError):
    """A request that cannot be served; raised before it is queued."""


class ContextLengthError(RequestError):
    """A prompt, with the output that it asks for, is over the context length."""

    @classmethod
    def of(cls, length: int, how: str) -> ContextLengthError:
        """The error with its first words, for which clients of OpenAI's API look."""
        return cls(f"This model's maximum context length is {length} tokens{how}")


class BusyError(RequestError):
    """A request that cannot be served now; the same may be a little later. HTTP 503."""


class EngineClosedError(ForerunError, RuntimeError):
    """An `LLM` was used after `close()`."""


class AlgorithmError(ForerunError, RuntimeError):
    """A drafting algorithm raised an exception or returned an invalid draft during a step."""


class ExecutorError(ForerunError, RuntimeError):
    """The executor failed or its process ended; requests in flight are lost."""


class InternalError(ForerunError, AssertionError):
    """A broken invariant: a bug in Forerun, nothing a user can fix."""


def shown(value: object, limit: int = 80) -> str:
    """A value for error messages: its repr on one line, cut to `limit` characters.

    Takes no longer for a large value: only as much of it is written as can be shown.
    """
    try:
        text = repr(_beginning(value, [limit], 8 * limit))
    except Exception as error:  # noqa: BLE001  a user's class; Python's limit for huge integers
        text = f"<{type(value).__name__}, whose repr fails: {type(error).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _beginning(value: Any, room: list[int], characters: int) -> Any:
    """The value without what is too far behind to be shown.

    Args:
        room: how many more values there is room for, each at least a character; counted down.
        characters: of a string.
    """
    room[0] -= 1
    if isinstance(value, str | bytes):
        return value[:characters]
    if room[0] <= 0:
        return "..." if isinstance(value, list | tuple | dict) else value
    if type(value) in (list, tuple):
        return type(value)(_beginning(item, room, characters) for item in value[: room[0] + 1])
    if type(value) is dict:
        items = islice(value.items(), room[0] + 1)
        return {
            _beginning(key, room, characters): _beginning(item, room, characters)
            for key, item in items
        }
    return value


def first_line(error: BaseException, limit: int = 300) -> str:
    """Returns the first line of a library's long message; the error's class where there is none."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` with the closest known word, or an empty string."""
    if len(word) > MAX_WORD:
        return ""
    names = list(known)
    match = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not match:  # case-insensitive
        folded = {name.lower(): name for name in names}
        match = [folded[m] for m in difflib.get_close_matches(word.lower(), folded, n=1)]
    return f" Did you mean {match[0]!r}?" if match else ""


def divisors(*sizes: int, at_most: int = MAX_DIVISOR) -> str:
    """The numbers up to `at_most` that divide all `sizes` (each >= 1), ascending: "1, 2, 4"."""
    size = math.gcd(*sizes)
    return ", ".join(str(n) for n in range(1, min(size, at_most) + 1) if size % n == 0)
