"""The base of all parsers: a coroutine that reads one character at a time.

A parser is written as if it read from a file. So what it finds depends on the text alone, not on
the pieces in which the text arrives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from typing import TypeVar

from forerun.server.parsers.events import Event, Reasoning, Text, merged

SPACES = frozenset(" \t\r\n")
T = TypeVar("T")
Reading = Generator[None, None, T]  # a coroutine: `yield` waits for the next character


class Scanner(ABC):
    """`feed` takes pieces of text, `finish` ends it; both return what was found.

    No event is ever taken back. Text is held back while it may belong to a marker.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._char = ""  # the next character, not consumed yet; "" at the end
        self._at = -1  # its index
        self._trims = False  # spaces before the next text are left out
        self._reading = self._start()
        next(self._reading)

    def feed(self, text: str) -> list[Event]:
        for char in text:
            self._char, self._at = char, self._at + 1
            next(self._reading)
        return self._take()

    def finish(self) -> list[Event]:
        """The rest, once the text has ended."""
        self._char, self._at = "", self._at + 1
        ended = next(self._reading, "ended")
        assert ended == "ended"
        return self._take()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Consumes characters until `_char` is empty. It never waits for more after that."""

    def _start(self) -> Reading[None]:
        yield
        yield from self._read()

    def _take(self) -> list[Event]:
        events, self._events = merged(self._events), []
        return events

    def _text(
        self, markers: Sequence[str], kind: type[Text | Reasoning] = Text, held: str = ""
    ) -> Reading[str]:
        """Emits text as events of `kind` up to the first marker, and consumes that.

        A marker's first character must not occur in it again. Spaces before a marker are left out.

        Args:
            held: text before it, not emitted yet. It may end with the beginning of a marker.

        Returns:
            The spaces and the marker; "" at the end of the text.
        """
        prefixes = {marker[:n] for marker in markers for n in range(1, len(marker) + 1)}
        space, candidate = split_before(held, prefixes)
        while self._char:
            if candidate + self._char in prefixes:
                candidate += self._char
                if candidate in markers:
                    yield
                    return space + candidate
            elif candidate:
                self._emit(kind, space + candidate)
                space = candidate = ""
                continue  # the character may begin another one
            elif self._char in SPACES:
                space += self._char
            else:
                self._emit(kind, space + self._char, self._at + 1)
                space = ""
            yield
        self._emit(kind, space + candidate)
        return ""

    def _emit(self, kind: type[Text | Reasoning], text: str, end: int | None = None) -> None:
        """`end`: index after the text; default: that of the next character."""
        if self._trims:
            text = text.lstrip(" \t\r\n")
        if text:
            self._trims = False
            start = (self._at if end is None else end) - len(text)
            self._events.append(Text(text, start) if kind is Text else kind(text))


def split_before(text: str, prefixes: Collection[str]) -> tuple[str, str]:
    """A text up to the longest one of `prefixes` that it ends with, and that; "": none."""
    size = min(len(text), max(map(len, prefixes), default=0))
    while size and text[-size:] not in prefixes:
        size -= 1
    end = len(text) - size
    return text[:end], text[end:]
