"""Tool calls as Llama 3.1, 3.2, 3.3 and 4 write them: JSON objects instead of an answer.

{"name": "get_weather", "parameters": {"city": "Paris"}}
<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}

Now and then there are commas between them, or a list.
"""

from __future__ import annotations

from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.json_object import Malformed
from forerun.server.parsers.object_calls import ObjectCallParser
from forerun.server.parsers.scanner import Reading

TAG, SEPARATOR = "<|python_tag|>", ";"
SEPARATORS = (SEPARATOR, ",")
START, END = "<|python_start|>", "<|python_end|>"  # of Llama 4


class Llama3Parser(ObjectCallParser):
    markers = (TAG, START)
    syntax = CallSyntax(
        opening=TAG,
        begin=('{"name": "', '", "parameters": '),
        end="}",
        separator=f"{SEPARATOR} ",
        bare="{[",
        tolerated=(START,),
    )

    def _calls(self) -> Reading[None]:
        yield from self._spaces()
        if self._char == "[":
            yield from self._objects()
            yield from self._spaces()
        else:
            yield from self._separated()
        if self._char == END[0]:
            yield from self._closing(END)
        else:
            self._flush()

    def _separated(self) -> Reading[None]:
        """Objects with a separator or spaces between them; a malformed one is text.

        Raises:
            Malformed: none is a call.
        """
        is_call = found = yield from self._sibling(self._object())
        while self._char:
            yield from self._spaces()
            separated = self._char in SEPARATORS
            if separated:
                yield from self._consume()
                yield from self._spaces()
            if self._char != "{" or not (separated or is_call):
                break
            self._raw = [] if is_call else self._raw
            is_call = yield from self._sibling(self._object())
            found |= is_call
        if not found:
            raise Malformed
