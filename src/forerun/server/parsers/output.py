"""A whole output: reasoning, then text and tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.server.parsers.events import Event, Reasoning, Text, merged
from forerun.server.parsers.reasoning import ReasoningParser
from forerun.server.parsers.thoughts import Thoughts
from forerun.server.parsers.tool_parser import ToolParser


class OutputParser:
    """A `Scanner`; without parsers everything is text."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning, self._tools = reasoning, tools
        self._thoughts: Thoughts | None = None
        if reasoning is not None and tools is not None:
            self._thoughts = Thoughts(tools.another())
        self._start: int | None = None  # of the answer, within the output
        self._length = 0  # of the text so far

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = [Text(text, self._length)] if text else []
        self._length += len(text)
        if self._reasoning is None and self._tools is None:
            return events
        if self._reasoning is not None:
            events = self._reasoning.feed(text)
        return merged(self._with_calls(events))

    def finish(self) -> list[Event]:
        found = list(self._with_calls([] if self._reasoning is None else self._reasoning.finish()))
        if self._thoughts is not None and self._start is None:
            found += self._thoughts.finish()
        if self._tools is not None:
            found += self._placed(self._tools.finish())
        return merged(found)

    def _with_calls(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            if self._thoughts is not None and isinstance(event, Reasoning):
                yield from self._thoughts.feed(event.text)
            elif self._tools is not None and isinstance(event, Text):
                if self._start is None:
                    self._start = event.start
                    yield from [] if self._thoughts is None else self._thoughts.answered()
                yield from self._placed(self._tools.feed(event.text))
            else:
                yield event

    def _placed(self, events: Iterable[Event]) -> Iterable[Event]:
        """Texts within the answer, at their places in the output."""
        start = self._start or 0
        for event in events:
            yield Text(event.text, start + event.start) if isinstance(event, Text) else event
