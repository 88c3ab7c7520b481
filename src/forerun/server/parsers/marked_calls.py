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
    other_closings: ClassVar[tuple[str, ...]] = ()  # read as `syntax.closing` is

    def _calls(self) -> Reading[None]:
        closing = self.syntax.closing.strip()
        first, *others = self.syntax.begin[0].split() or [""]
        yield from self._words(self.syntax.begin[0].strip().removeprefix(self._marker))
        while True:
            last = yield from self._call()
            if last == closing:
                return
            if self.syntax.one_each:
                yield from self._closing(closing)
                return
            if (yield from self._closing(first, closing, *self.other_closings)) != first:
                return
            yield from self._words(" ".join(others))

    def _call(self) -> Reading[str]:
        """A call from its name on, with its end.

        Returns:
            What was read last.
        """
        yield from self._spaces()
        name = yield from self._name(self.name_ends)
        yield from self._words(self.syntax.begin[1])
        self._announce(self._function(name))
        return (yield from self._written_arguments())

    def _function(self, name: str) -> str:
        """The function that a name stands for."""
        return name

    def _written_arguments(self) -> Reading[str]:
        """The arguments of the announced call with what ends the call.

        Returns:
            What was read last.

        Raises:
            Malformed: something else.
        """
        yield from self._spaces()
        if self._char and self.syntax.end.strip().startswith(self._char):  # none
            self._argue("{}")
            self._complete()
        else:
            yield from self._arguments()
        yield from self._ending(self.syntax.end)
        return self.syntax.end

    def _words(self, text: str) -> Reading[None]:
        """The words of `text`, with any spaces before each.

        Raises:
            Malformed: something else.
        """
        for word in text.split():
            yield from self._spaces()
            yield from self._literal(word)

    def _ending(self, text: str) -> Reading[None]:
        """The words of `text` after a complete call; they are not missed where the text ends.

        Raises:
            Malformed: something else.
        """
        for word in text.split():
            yield from self._closing(word)
            self._raw = []
