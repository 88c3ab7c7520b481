"""Tool calls as DeepSeek V3 and R1 write them, and as V3.1 does.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from abc import abstractmethod

from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.scanner import Reading
from forerun.server.parsers.tool_parser import ToolParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


class _DeepSeekParser(ToolParser):
    markers = (CALLS_BEGIN,)

    def _calls(self) -> Reading[None]:
        yield from self._spaces()
        begin = yield from self._literal(CALL_BEGIN)
        while begin == CALL_BEGIN:
            yield from self._call()
            begin = yield from self._closing(CALL_BEGIN, CALLS_END)

    @abstractmethod
    def _call(self) -> Reading[None]:
        """One call after its first marker, with its last marker."""

    def _named(self, name: str) -> Reading[None]:
        """The arguments of the call."""
        yield from self._spaces()
        self._announce(name)
        yield from self._arguments()


class DeepSeekV3Parser(_DeepSeekParser):
    syntax = CallSyntax(
        opening=CALLS_BEGIN,
        begin=(f"{CALL_BEGIN}function{SEPARATOR}", f"\n{FENCE}json\n"),
        end=f"\n{FENCE}{CALL_END}",
        closing=CALLS_END,
        separator="\n",
    )

    def _call(self) -> Reading[None]:
        yield from self._literal("function")
        yield from self._literal(SEPARATOR)
        name = yield from self._line("\n")
        yield from self._spaces()
        yield from self._literal(FENCE + "json")
        yield from self._named(name)
        yield from self._closing(FENCE)
        yield from self._closing(CALL_END)


class DeepSeekV31Parser(_DeepSeekParser):
    syntax = CallSyntax(
        opening=CALLS_BEGIN,
        begin=(CALL_BEGIN, SEPARATOR),
        end=CALL_END,
        closing=CALLS_END,
    )

    def _call(self) -> Reading[None]:
        name = yield from self._line(SEPARATOR[0])
        yield from self._literal(SEPARATOR)
        yield from self._named(name)
        yield from self._closing(CALL_END)
