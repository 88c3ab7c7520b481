"""Tool calls as Kimi K2 writes them: functions with running numbers.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>

Some answers leave out the "s" of the section's marks.
"""

from __future__ import annotations

from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.marked_calls import MarkedCallParser

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
TOLERATED = (SECTION_BEGIN.replace("calls", "call"), CALL_BEGIN)
_PREFIX = "functions."


class KimiK2Parser(MarkedCallParser):
    other_closings = (SECTION_END.replace("calls", "call"),)
    markers = (SECTION_BEGIN, *TOLERATED)
    name_ends = "<"
    call_id = "functions.{name}:{index}"
    syntax = CallSyntax(
        opening=SECTION_BEGIN,
        begin=(CALL_BEGIN, ARGUMENTS_BEGIN),
        prefix=_PREFIX,
        number=":",
        end=CALL_END,
        closing=SECTION_END,
        tolerated=TOLERATED,
    )

    def _function(self, name: str) -> str:
        known, _, number = name.rpartition(":")
        names = [known, name] if number.isdecimal() else [name]
        bare = [each.removeprefix(_PREFIX) for each in names]
        return next((each for each in [*bare, *names] if each in self._functions), bare[0])
