"""Tool calls as DeepSeek V3 and R1 write them, and as V3.1 does.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.marked_calls import MarkedCallParser
from forerun.server.parsers.scanner import Reading

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
KIND = "function"  # of a call in the first form
FENCE = "```"


class DeepSeekParser(MarkedCallParser):
    """Reads both forms, with or without a fence."""

    markers = (CALLS_BEGIN, CALL_BEGIN)
    begin = CALL_BEGIN
    ends = (FENCE, CALL_END)
    name_ends = SEPARATOR[0]

    def _call_name(self) -> Reading[str]:
        name = yield from self._name(self.name_ends)
        yield from self._literal(SEPARATOR)
        yield from self._spaces()
        if name == KIND and self._char and self._char not in f"{{{FENCE[0]}{CALL_END[0]}":
            name = yield from self._name("\n{")
            yield from self._spaces()
        if self._char == FENCE[0]:
            yield from self._literal(FENCE)
            yield from self._name("\n{")
        return name


class DeepSeekV3Parser(DeepSeekParser):
    syntax = CallSyntax(
        opening=CALLS_BEGIN,
        begin=(f"{CALL_BEGIN}{KIND}{SEPARATOR}", f"\n{FENCE}json\n"),
        end=f"\n{FENCE}{CALL_END}",
        closing=CALLS_END,
        tolerated=(CALL_BEGIN,),
        separator="\n",
    )


class DeepSeekV31Parser(DeepSeekParser):
    syntax = CallSyntax(
        opening=CALLS_BEGIN,
        begin=(CALL_BEGIN, SEPARATOR),
        end=CALL_END,
        closing=CALLS_END,
        tolerated=(CALL_BEGIN,),
    )
