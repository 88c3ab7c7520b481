"""Tool calls as Gemma 4 writes them.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

At the beginning of an answer the first mark may be missing, or a colon may follow it.
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
        opening=BEGIN,
        begin=("call:", ""),
        end="",
        closing=END,
        one_each=True,
        style=Style.GEMMA,
        tolerated=("call:",),
    )

    def _beginning(self) -> Reading[str]:
        yield from self._spaces()
        if self._char != "c":
            held, self._raw = "".join(self._raw), []
            return held
        return (yield from self._guarded(self._calls()))

    def _calls(self) -> Reading[None]:
        word = "call:"
        yield from self._spaces()
        if self._char == ":":
            yield from self._consume()
        yield from self._word(word)
        while word == "call:":
            self._announce((yield from self._name("{(<")))
            yield from self._written_arguments()
            self._complete()
            word = yield from self._closing(END, "call:")

    def _written_arguments(self) -> Reading[None]:
        """An object, or none at all."""
        if self._char == "{":
            yield from self._object()
            return
        if self._char == "(":
            yield from self._literal("()")
        self._argue("{}")
