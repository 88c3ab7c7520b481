"""Strict recognition of JSON, one character at a time (RFC 8259)."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SPACES = frozenset(" \t\r\n")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_BARE = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_BARE_CHARACTERS = frozenset("-+.0123456789eEtrufalsn")
MAX_DEPTH = 512  # objects and lists within each other
MAX_BARE = 400  # characters of a number


class Malformed(Exception):
    """The text is not what the format asks for."""


class Expect(Enum):
    """What the next character belongs to."""

    VALUE = auto()
    FIRST_ITEM = auto()  # of a list: a value or its end
    FIRST_KEY = auto()  # of an object: a key or its end
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma or the end of an object or list
    STRING = auto()
    BARE = auto()  # a number, true, false or null
    END = auto()


class JsonScanner:
    """One JSON object."""

    def __init__(self) -> None:
        self.expect = Expect.VALUE
        self.is_key = False  # the string that is being read, or was read last
        self._open: list[str] = []  # "{" and "["
        self._escape = 0  # characters left of an escape sequence
        self._bare = ""

    @property
    def depth(self) -> int:
        """Objects and lists that are open."""
        return len(self._open)

    @property
    def done(self) -> bool:
        return self.expect is Expect.END

    def push(self, char: str) -> None:
        """
        Raises:
            Malformed: no JSON object goes on like this.
        """
        if self.expect is Expect.STRING:
            self._in_string(char)
        elif self.expect is Expect.BARE and char in _BARE_CHARACTERS:
            self._bare += char
            if len(self._bare) > MAX_BARE:
                raise Malformed
        else:
            if self.expect is Expect.BARE:
                if not _BARE.fullmatch(self._bare):
                    raise Malformed
                self.expect = Expect.NEXT
            if char not in _SPACES:
                self._outside(char)

    def _in_string(self, char: str) -> None:
        if self._escape > 1:  # \uXXXX
            if char not in _HEX:
                raise Malformed
            self._escape -= 1
            if self._escape == 1:
                self._escape = 0
        elif self._escape:
            if char != "u" and char not in _ESCAPED:
                raise Malformed
            self._escape = 5 if char == "u" else 0
        elif char == "\\":
            self._escape = 1
        elif char == '"':
            self.expect = Expect.COLON if self.is_key else Expect.NEXT
        elif char < " ":
            raise Malformed

    def _outside(self, char: str) -> None:
        match self.expect:
            case Expect.FIRST_KEY | Expect.KEY if char == '"':
                self.expect, self.is_key = Expect.STRING, True
            case Expect.COLON if char == ":":
                self.expect = Expect.VALUE
            case Expect.NEXT if char == ",":
                self.expect = Expect.KEY if self._open[-1] == "{" else Expect.VALUE
            case Expect.NEXT | Expect.FIRST_KEY if char == "}" and self._open[-1] == "{":
                self._close()
            case Expect.NEXT | Expect.FIRST_ITEM if char == "]" and self._open[-1] == "[":
                self._close()
            case Expect.VALUE | Expect.FIRST_ITEM:
                self._begin(char)
            case _:
                raise Malformed

    def _begin(self, char: str) -> None:
        """A value begins."""
        if char in "{[" and (self._open or char == "{"):
            self._open.append(char)
            if self.depth > MAX_DEPTH:
                raise Malformed
            self.expect = Expect.FIRST_KEY if char == "{" else Expect.FIRST_ITEM
        elif not self._open:
            raise Malformed
        elif char == '"':
            self.expect, self.is_key = Expect.STRING, False
        elif char in _BARE_CHARACTERS:
            self.expect, self._bare = Expect.BARE, char
        else:
            raise Malformed

    def _close(self) -> None:
        self._open.pop()
        self.expect = Expect.NEXT if self._open else Expect.END


def decoded_string(raw: str) -> str:
    """The value of a JSON string with its quotes.

    Raises:
        Malformed: it has a lone surrogate.
    """
    value: str = json.loads(raw)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed from None
    return value
