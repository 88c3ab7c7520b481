"""Reasoning between two marks, before the answer."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.server.parsers.events import Reasoning
from forerun.server.parsers.scanner import SPACES, Reading, Scanner


@dataclass(frozen=True)
class ReasoningSyntax:
    """How a model writes reasoning. Of several marks the first one is what grammars enforce."""

    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    opened: bool = False  # where the prompt does not say whether outputs begin with reasoning
    following: str = "\\n{0,2}"  # a regular expression: between reasoning and the answer
    answer: str = ""  # what the answer begins with

    def begins_in(self, prompt_tail: str) -> bool | None:
        """Whether an output begins with reasoning, by the end of its prompt; None: it has none."""
        tail = prompt_tail.rstrip()
        if tail.endswith(self.end):
            return None
        return tail.endswith(self.begin) or self.opened

    def length(self, text: str, opened: bool) -> int | None:
        """Where the reasoning at a text's beginning ends, with its marks.

        Args:
            opened: as of `ReasoningParser`, which splits the text there.

        Returns:
            0: there is none; None: it has not ended.
        """
        start = len(text) - len(text.lstrip("".join(SPACES)))
        if not opened and not text.startswith(self.begin, start):
            return 0
        ends = [at + len(end) for end in self.end if (at := text.find(end, start)) >= 0]
        return min(ends, default=None)


THINK = ReasoningSyntax()


class ReasoningParser(Scanner):
    """Splits a text into reasoning and an answer. Spaces at the border are left out.

    A text that is opened is reasoning up to its end's mark, with or without the other mark at its
    beginning. Another one has reasoning only if it begins with that.
    """

    def __init__(self, opened: bool, syntax: ReasoningSyntax = THINK) -> None:
        self._opened, self._syntax = opened, syntax
        super().__init__()

    def _read(self) -> Reading[None]:
        held, word = yield from self._beginning()
        if word in self._syntax.begin or (self._opened and not word):
            self._trims = True
            word = yield from self._text(self._syntax.end, Reasoning, held)
            held = ""
        self._trims = bool(word)
        yield from self._text((), held=held)

    def _beginning(self) -> Reading[tuple[str, str]]:
        """Text to emit, and the mark that the text begins with, if it does."""
        words = self._syntax.begin + (self._syntax.end if self._opened else ())
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
