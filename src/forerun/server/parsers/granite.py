"""Tool calls as Granite 3 writes them: a list of JSON objects, once. Granite 4 writes Hermes'.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
"""

from __future__ import annotations

from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.object_calls import ObjectCallParser
from forerun.server.parsers.scanner import Reading

TOKEN = "<|tool_call|>"
OTHERS = ("<tool_call>", "<function_call>")  # of Granite 3.1 and 20B


class GraniteParser(ObjectCallParser):
    markers = (TOKEN, *OTHERS)
    syntax = CallSyntax(
        opening=TOKEN,
        inner="[",
        begin=('{"name": "', '", "arguments": '),
        end="}",
        closing="]",
        separator=", ",
        tolerated=OTHERS,
    )

    def _calls(self) -> Reading[None]:
        yield from self._objects()
        if self._marker == OTHERS[0] and self._char == "<":
            yield from self._closing(OTHERS[0].replace("<", "</"))
