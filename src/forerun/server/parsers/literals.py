"""Literals that are not JSON, turned into JSON as they come: Python's, and Gemma's."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.server.parsers.argument_values import escaped
from forerun.server.parsers.json_object import MAX_BARE, Malformed
from forerun.server.parsers.scanner import SPACES, Reading
from forerun.server.parsers.tool_parser import MAX_NAME_LENGTH, ToolParser

MAX_NESTING = 64  # lists and objects within each other
_WORDS: Mapping[str, str] = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false",
    "null": "null",
}  # fmt: skip
_ESCAPED = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\",
    "'": "'", '"': '"', "/": "/", "\n": "",
}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}  # hexadecimal ones of an escape sequence
_CLOSING = {"[": "]", "(": ")", "{": "}"}


@dataclass(frozen=True)
class Notation:
    """What literals of a language are made of, beside numbers, lists and objects."""

    quote: str = ""  # around strings without escapes; else they are as Python's
    bare: bool = False  # keys, and texts that are no other value, need no quotes


PYTHON = Notation()


class LiteralParser(ToolParser):
    """Calls with literals."""

    notation: ClassVar[Notation] = PYTHON

    def _value(self, depth: int = 0) -> Reading[None]:
        """A literal, after spaces.

        Raises:
            Malformed: something else, or it is nested too deeply.
        """
        yield from self._spaces()
        if depth > MAX_NESTING:
            raise Malformed
        if self._char == "{":
            yield from self._object(depth)
        elif self._char and self._char in "[(":
            yield from self._list(depth)
        elif self._char and self._char in f"'\"{self.notation.quote[:1]}":
            yield from self._string()
        else:
            yield from self._bare()

    def _list(self, depth: int) -> Reading[None]:
        closing = _CLOSING[self._char]
        yield from self._consume()
        yield from self._spaces()
        self._argue("[")
        comma = ""
        while self._char != closing:
            self._argue(comma)
            yield from self._value(depth + 1)
            yield from self._comma(closing)
            comma = ", "
        self._argue("]")
        yield from self._consume()

    def _object(self, depth: int = 0) -> Reading[None]:
        yield from self._literal("{")
        yield from self._spaces()
        comma = "{"
        while self._char != "}":
            self._argue(comma)
            yield from self._key()
            yield from self._word(":")
            self._argue(": ")
            yield from self._value(depth + 1)
            yield from self._comma("}")
            comma = ", "
        self._argue("{}" if comma == "{" else "}")
        yield from self._consume()

    def _comma(self, closing: str) -> Reading[None]:
        """What follows a value: a comma, or the end, which is not consumed.

        Raises:
            Malformed: something else.
        """
        yield from self._spaces()
        if self._char != closing:
            yield from self._literal(",")
            yield from self._spaces()

    def _key(self) -> Reading[None]:
        if self.notation.bare and self._char not in ('"', "'", self.notation.quote[:1]):
            name = yield from self._name(":,{}")
            self._argue(json.dumps(name, ensure_ascii=False))
        else:
            yield from self._string()

    # --- strings --------------------------------------------------------------------------------

    def _string(self) -> Reading[None]:
        if not self._char or self._char not in f"'\"{self.notation.quote[:1]}":
            raise Malformed
        self._argue('"')
        if self.notation.quote and self._char == self.notation.quote[0]:
            yield from self._literal(self.notation.quote)
            yield from self._until((self.notation.quote,), lambda text: self._argue(escaped(text)))
        else:
            yield from self._quoted()
        self._argue('"')

    def _quoted(self) -> Reading[None]:
        """A string as in Python, between one or three quotes; either may have line breaks."""
        quote, count = self._char, 0
        while self._char == quote and count < 3:
            count += 1
            yield from self._consume()
        if count == 2:
            return
        ends = 0
        while ends < count:
            char = self._char
            if not char:
                raise Malformed
            if char == quote:
                ends += 1
                yield from self._consume()
                continue
            self._argue(escaped(quote * ends))
            ends = 0
            yield from self._consume()
            if char == "\\":
                yield from self._escape()
            else:
                self._argue(escaped(char))

    def _escape(self) -> Reading[None]:
        """What follows a backslash."""
        char = self._char
        if char in _DIGITS:
            yield from self._consume()
            digits = ""
            while len(digits) < _DIGITS[char]:
                digits += self._char
                if not self._char or self._char not in "0123456789abcdefABCDEF":
                    raise Malformed
                yield from self._consume()
            if char == "u":  # may be half of a pair, as in JSON
                self._argue(f"\\u{digits}")
            elif int(digits, 16) > 0x10FFFF:
                raise Malformed
            else:
                self._argue(escaped(chr(int(digits, 16))))
            return
        if not char:
            raise Malformed
        self._argue(escaped(_ESCAPED.get(char, f"\\{char}")))
        yield from self._consume()

    # --- numbers and words ----------------------------------------------------------------------

    def _bare(self) -> Reading[None]:
        """A number, a word, or, where the notation has such, a text without quotes."""
        read = ""
        most = MAX_BARE if not self.notation.bare else MAX_NAME_LENGTH * 16
        while self._char and self._char not in ",)]}":
            if self._char in SPACES and not self.notation.bare:
                break
            read += self._char
            if len(read) > most:
                raise Malformed
            yield from self._consume()
        if not self._char:
            raise Malformed
        self._argue(self._json_of(read.strip()))

    def _json_of(self, text: str) -> str:
        if text in _WORDS:
            return _WORDS[text]
        value = _number(text)
        if value is not None:
            return json.dumps(value)
        if not self.notation.bare or not text:
            raise Malformed
        return json.dumps(text, ensure_ascii=False)


def _number(text: str) -> Any:
    """A number in Python's notation; None: it is none, or JSON has none such."""
    if not text or text[0] not in "+-.0123456789":
        return None
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, int | float) else None
