"""The base of formats whose names stand between markers: `CallSyntax` says all about them."""

from __future__ import annotations

from typing import ClassVar

from forerun.server.parsers.scanner import Reading
from forerun.server.parsers.tool_parser import ToolParser


class MarkedCallParser(ToolParser):
    """Reads `CallSyntax`, with any space where it has one or between its parts.

    Where what a call begins with is a marker, too, the opening may be missing, and calls after a
    malformed one are read.
    """

    name_ends: ClassVar[str]  # characters, none of which is in a name
    begin: ClassVar[str] = ""  # of a call, where it is read more tolerantly than the syntax says
    ends: ClassVar[tuple[str, ...]] = ()  # of a call; default: the words of the syntax
    other_closings: ClassVar[tuple[str, ...]] = ()  # read as `syntax.closing` is

    def _calls(self) -> Reading[None]:
        word = self._marker
        while word in self.markers:
            begin = self.begin or self.syntax.begin[0].strip()
            yield from self._words(begin.removeprefix(word))
            word = yield from self._call()
            if word not in (*self.markers, *self._closings, ""):
                word = yield from self._closing(*self.markers, *self._closings)
            self._raw = [word] if word in self.markers else []

    @property
    def _closings(self) -> tuple[str, ...]:
        return (self.syntax.closing.strip(), *self.other_closings)

    def _call(self) -> Reading[str]:
        """A call from its name on, with its end, or with what follows where that is missing.

        Returns:
            What was read last; "" where the text has ended.
        """
        yield from self._spaces()
        self._announce(self._function((yield from self._call_name())))
        return (yield from self._written_arguments())

    def _call_name(self) -> Reading[str]:
        """A call's name, with what stands between that and the arguments."""
        name = yield from self._name(self.name_ends)
        yield from self._words(self.syntax.begin[1])
        return name

    def _function(self, name: str) -> str:
        """The function that a name stands for."""
        return name

    def _written_arguments(self) -> Reading[str]:
        """The arguments of the announced call with what ends the call, of which any word may be
        missing where what follows it is there.

        Returns:
            What was read last; "" where the text has ended.

        Raises:
            Malformed: something else.
        """
        ends = self.ends or tuple(self.syntax.end.split())
        yield from self._spaces()
        if self._char and any(end.startswith(self._char) for end in ends):  # none
            self._argue("{}")
            self._complete()
        else:
            yield from self._arguments()
        word = ""
        while ends:
            word = yield from self._closing(*ends, *self.markers, *self._closings)
            self._raw = []
            ends = ends[ends.index(word) + 1 :] if word in ends else ()
        return word

    def _words(self, text: str) -> Reading[None]:
        """The words of `text`, with any spaces before each.

        Raises:
            Malformed: something else.
        """
        for word in text.split():
            yield from self._spaces()
            yield from self._literal(word)
