"""Reasoning between <think> and </think>, before the answer."""

from __future__ import annotations

from forerun.server.parsers.events import Reasoning
from forerun.server.parsers.scanner import SPACES, Reading, Scanner

BEGIN, END = "<think>", "</think>"


def reasoning_end(text: str, opened: bool) -> int | None:
    """Where the reasoning at a text's beginning ends, with its markers.

    Args:
        opened: as of `ReasoningParser`, which splits the text there.

    Returns:
        0: there is none; None: it has not ended.
    """
    start = len(text) - len(text.lstrip("".join(SPACES)))
    if not opened and not text.startswith(BEGIN, start):
        return 0
    end = text.find(END, start)
    return None if end < 0 else end + len(END)


class ReasoningParser(Scanner):
    """Splits a text into reasoning and an answer. Spaces at the border are left out.

    A text that is opened is reasoning up to </think>, with or without <think> at its beginning.
    Another one has reasoning only if it begins with <think>.
    """

    def __init__(self, opened: bool) -> None:
        self._opened = opened
        super().__init__()

    def _read(self) -> Reading[None]:
        held, word = yield from self._beginning()
        if word == BEGIN or (self._opened and not word):
            self._trims = True
            word = yield from self._text((END,), Reasoning, held)
            held = ""
        self._trims = bool(word)
        yield from self._text((), held=held)

    def _beginning(self) -> Reading[tuple[str, str]]:
        """Text to emit, and the marker that the text begins with, if it does."""
        words = (BEGIN, END) if self._opened else (BEGIN,)
        space = read = ""
        while self._char and self._char in SPACES:
            space += self._char
            yield
        while self._char and any(word.startswith(read + self._char) for word in words):
            read += self._char
            yield
            if read in words:
                return "", read
        return space + read, ""
