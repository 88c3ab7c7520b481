"""Tool calls as Hermes and Qwen 2.5 and 3 write them.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>

Now and then there are several calls, or a list of them, between the marks.
"""

from __future__ import annotations

from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.object_calls import ObjectCallParser
from forerun.server.parsers.scanner import Reading

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ObjectCallParser):
    markers = (BEGIN,)
    syntax = CallSyntax(
        opening=BEGIN,
        begin=('\n{"name": "', '", "arguments": '),
        end="}\n",
        closing=END,
        separator="\n",
        one_each=True,
    )

    def _calls(self) -> Reading[None]:
        yield from self._objects()
        yield from self._closing(END)
