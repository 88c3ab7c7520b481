"""Tool calls as Gemma 4 writes them.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

from forerun.server.parsers.call_syntax import CallSyntax, Style
from forerun.server.parsers.literals import LiteralParser, Notation
from forerun.server.parsers.scanner import Reading

BEGIN, END = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'


class Gemma4Parser(LiteralParser):
    markers = (BEGIN,)
    notation = Notation(quote=QUOTE, bare=True)
    syntax = CallSyntax(
        opening=BEGIN, begin=("call:", ""), end="", closing=END, one_each=True, style=Style.GEMMA
    )

    def _calls(self) -> Reading[None]:
        word = "call:"
        yield from self._word(word)
        while word == "call:":
            self._announce((yield from self._name("{")))
            yield from self._object()
            self._complete()
            word = yield from self._closing(END, "call:")
