"""Tool calls as Llama 3.1, 3.2, 3.3 and 4 write them: JSON objects instead of an answer.

{"name": "get_weather", "parameters": {"city": "Paris"}}
<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}
"""

from __future__ import annotations

from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.events import Text
from forerun.server.parsers.object_calls import ObjectCallParser
from forerun.server.parsers.scanner import Reading

TAG, SEPARATOR = "<|python_tag|>", ";"
START, END = "<|python_start|>", "<|python_end|>"  # of Llama 4


class Llama3Parser(ObjectCallParser):
    markers = (TAG, START)
    syntax = CallSyntax(
        opening=TAG,
        begin=('{"name": "', '", "parameters": '),
        end="}",
        separator=f"{SEPARATOR} ",
        bare="{",
    )

    def _calls(self) -> Reading[None]:
        yield from self._spaces()
        yield from self._object()
        while self._char:
            yield from self._spaces()
            if self._char == SEPARATOR:
                yield from self._consume()
                yield from self._spaces()
            if self._char == END[0]:
                yield from self._closing(END)
                return
            if self._char != "{":
                self._emit(Text, "".join(self._raw))
                return
            yield from self._object()
