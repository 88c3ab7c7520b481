"""Tool calls as Mistral's models write them: as a list of objects, or each by itself.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]
[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}
"""

from __future__ import annotations

from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.object_calls import ObjectCallParser
from forerun.server.parsers.scanner import Reading
from forerun.server.parsers.tool_parser import ToolParser

MARKER, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ObjectCallParser):
    """Reads both forms; grammars enforce the list."""

    markers = (MARKER,)
    call_id = "{index:09}"  # templates want nine letters or digits
    syntax = CallSyntax(
        opening=MARKER,
        inner="[",
        begin=('{"name": "', '", "arguments": '),
        end="}",
        closing="]",
        separator=", ",
    )

    @classmethod
    def written_as(cls, template: str) -> type[ToolParser]:
        return MistralArgsParser if ARGUMENTS in template else cls

    def _calls(self) -> Reading[None]:
        yield from self._spaces()
        if self._char and self._char in "[{":
            yield from self._objects()
            return
        name = yield from self._name("[{")
        if self._char == "[" and (yield from self._literal(CALL_ID, ARGUMENTS)) == CALL_ID:
            yield from self._name("[{")
            yield from self._word(ARGUMENTS)
        yield from self._spaces()
        self._announce(name)
        yield from self._arguments()


class MistralArgsParser(MistralParser):
    """The form of the models since 2025; grammars enforce calls one by one."""

    syntax = CallSyntax(opening=MARKER, begin=("", ARGUMENTS), end="", one_each=True)
