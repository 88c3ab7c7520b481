"""Tool calls as Python writes them.

Llama 4:  <|python_start|>[get_weather(city="Paris", days=3), now()]<|python_end|>
          At the beginning of an answer the marks may be missing.
OLMo 3:   <function_calls>
          get_weather(city="Paris", days=3)
          now()
          </function_calls>
"""

from __future__ import annotations

import json

from forerun.server.parsers.call_syntax import CallSyntax, Style
from forerun.server.parsers.events import Text
from forerun.server.parsers.json_object import Malformed
from forerun.server.parsers.literals import LiteralParser
from forerun.server.parsers.scanner import SPACES, Reading

START, END = "<|python_start|>", "<|python_end|>"
CALLS_BEGIN, CALLS_END = "<function_calls>", "</function_calls>"


class PythonCallParser(LiteralParser):
    def _python_call(self) -> Reading[None]:
        """A call with named arguments.

        Raises:
            Malformed: something else.
        """
        name = yield from self._name("(\n")
        yield from self._literal("(")
        self._announce(name)
        yield from self._spaces()
        keys: set[str] = set()
        while self._char != ")":
            key = yield from self._name("=,)(\n")
            yield from self._literal("=")
            if key in keys or not key.isidentifier():
                raise Malformed
            self._argue(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
            yield from self._value()
            yield from self._comma(")")
        self._argue("}" if keys else "{}")
        self._complete()
        yield from self._consume()


class Llama4Parser(PythonCallParser):
    markers = (START,)
    syntax = CallSyntax(
        opening=START,
        inner="[",
        begin=("", "("),
        end=")",
        closing="]",
        separator=", ",
        bare="[",
        style=Style.PYTHON,
    )

    def _calls(self) -> Reading[None]:
        yield from self._word("[")
        yield from self._siblings(self._python_call)
        self._raw = []
        yield from self._spaces()
        if self._char == END[0]:
            yield from self._closing(END)
        else:
            self._emit(Text, "".join(self._raw))


class Olmo3Parser(PythonCallParser):
    markers = (CALLS_BEGIN,)
    syntax = CallSyntax(
        opening=CALLS_BEGIN,
        begin=("", "("),
        end=")",
        closing=CALLS_END,
        separator="\n",
        style=Style.PYTHON,
    )

    def _calls(self) -> Reading[None]:
        """Commas and brackets as in a list of Python are passed over."""
        found = False
        yield from self._passed_over()
        while self._char and self._char != CALLS_END[0]:
            if (yield from self._sibling(self._python_call())):
                self._raw, found = [], True
            yield from self._passed_over()
        if not found:
            raise Malformed
        yield from self._closing(CALLS_END)

    def _passed_over(self) -> Reading[None]:
        while self._char and (self._char in SPACES or self._char in "[],"):
            yield from self._consume()
