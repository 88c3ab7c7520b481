"""A whole output: reasoning, then text and tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.server.parsers.events import Event, Text, merged
from forerun.server.parsers.reasoning import ReasoningParser
from forerun.server.parsers.tool_parser import ToolParser


class OutputParser:
    """As `Scanner`; without parsers everything is text."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str) -> list[Event]:
        events = [Text(text)] if self._reasoning is None else self._reasoning.feed(text)
        return merged(self._with_calls(events))

    def finish(self) -> list[Event]:
        found = list(self._with_calls([] if self._reasoning is None else self._reasoning.finish()))
        return merged(found if self._tools is None else [*found, *self._tools.finish()])

    def _with_calls(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            if self._tools is not None and isinstance(event, Text):
                yield from self._tools.feed(event.text)
            else:
                yield event
