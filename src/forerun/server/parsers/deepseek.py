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

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


class DeepSeekV3Parser(MarkedCallParser):
    markers = (CALLS_BEGIN, CALL_BEGIN)
    name_ends = "\n"
    syntax = CallSyntax(
        opening=CALLS_BEGIN,
        begin=(f"{CALL_BEGIN}function{SEPARATOR}", f"\n{FENCE}json\n"),
        end=f"\n{FENCE}{CALL_END}",
        closing=CALLS_END,
        tolerated=(CALL_BEGIN,),
        separator="\n",
    )


class DeepSeekV31Parser(MarkedCallParser):
    markers = (CALLS_BEGIN, CALL_BEGIN)
    name_ends = SEPARATOR[0]
    syntax = CallSyntax(
        opening=CALLS_BEGIN,
        begin=(CALL_BEGIN, SEPARATOR),
        end=CALL_END,
        closing=CALLS_END,
        tolerated=(CALL_BEGIN,),
    )
