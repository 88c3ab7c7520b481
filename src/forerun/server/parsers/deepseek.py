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
FENCE = "```"


class DeepSeekParser(MarkedCallParser):
    """A fence, or its language, may be missing where one belongs, and stand where none does."""

    markers = (CALLS_BEGIN, CALL_BEGIN)
    ends = (FENCE, CALL_END)

    def _before_arguments(self) -> Reading[None]:
        yield from self._words(self.syntax.begin[1].partition(FENCE)[0])
        yield from self._spaces()
        if self._char == FENCE[0]:
            yield from self._literal(FENCE)
            yield from self._name("\n{")


class DeepSeekV3Parser(DeepSeekParser):
    name_ends = "\n"
    syntax = CallSyntax(
        opening=CALLS_BEGIN,
        begin=(f"{CALL_BEGIN}function{SEPARATOR}", f"\n{FENCE}json\n"),
        end=f"\n{FENCE}{CALL_END}",
        closing=CALLS_END,
        tolerated=(CALL_BEGIN,),
        separator="\n",
    )


class DeepSeekV31Parser(DeepSeekParser):
    name_ends = SEPARATOR[0]
    syntax = CallSyntax(
        opening=CALLS_BEGIN,
        begin=(CALL_BEGIN, SEPARATOR),
        end=CALL_END,
        closing=CALLS_END,
        tolerated=(CALL_BEGIN,),
    )
