"""Calls at the end of reasoning, whose end some models forget to mark before they call."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.server.parsers.events import CallEnd, Event, Reasoning, Text
from forerun.server.parsers.tool_parser import ToolParser


class Thoughts:
    """Reasoning as it comes, in which what may be calls waits.

    They are calls if the output ends with them, and reasoning if anything else follows.
    """

    def __init__(self, tools: ToolParser) -> None:
        """`tools`: for the reasoning alone."""
        self._tools = tools
        self._waiting: list[str] = []  # reasoning, or calls
        self._begin = 0  # index of it, in the reasoning
        self._calls: list[Event] = []  # in it

    def feed(self, text: str) -> list[Event]:
        """More of the reasoning; returns what is reasoning for certain."""
        self._waiting.append(text)
        return self._sorted(self._tools.feed(text))

    def answered(self) -> list[Event]:
        """The rest: an answer follows."""
        rest, self._waiting = "".join(self._waiting), []
        return [Reasoning(rest)]

    def finish(self) -> list[Event]:
        """The rest: the output has no answer."""
        reasoning = self._sorted(self._tools.finish())
        return reasoning + (self._calls if CallEnd() in self._calls else self.answered())

    def _sorted(self, found: Iterable[Event]) -> list[Event]:
        end = self._begin
        for event in found:
            if isinstance(event, Text):
                end, self._calls = event.start + len(event.text), []
            else:
                self._calls.append(event)
        known = end - self._begin
        if not known:
            return []
        text = "".join(self._waiting)
        self._waiting, self._begin = [text[known:]], end
        return [Reasoning(text[:known])]
