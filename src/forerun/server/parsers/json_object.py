"""Recognition of JSON (RFC 8259), one character at a time.

What models write wrongly in a way that leaves no doubt is mended: control characters in strings,
escapes that JSON lacks, and Python's words.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SPACES = frozenset(" \t\r\n")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_BARE = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_BARE_CHARACTERS = frozenset("-+.0123456789eEtrufalsnTFNo")
_WORDS = {"True": "true", "False": "false", "None": "null"}  # each as long as JSON's
_NO_ESCAPE = {"'": "u0027"}  # after a backslash; others stand for themselves and for that
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

    def push(self, char: str) -> str:
        """Returns the JSON of the character, which is another one where it was mended.

        Raises:
            Malformed: no JSON object goes on like this.
        """
        if self.expect is Expect.STRING:
            return self._in_string(char)
        if self.expect is Expect.BARE and char in _BARE_CHARACTERS:
            self._bare += char
            if len(self._bare) > MAX_BARE:
                raise Malformed
            return self._of_word(char)
        if self.expect is Expect.BARE:
            if self._bare not in _WORDS and not _BARE.fullmatch(self._bare):
                raise Malformed
            self.expect = Expect.NEXT
        if char not in _SPACES:
            self._outside(char)
        return self._of_word(char) if self.expect is Expect.BARE else char

    def _of_word(self, char: str) -> str:
        """The JSON of the last character of a word or a number."""
        for word, written in _WORDS.items():
            if word.startswith(self._bare):
                return written[len(self._bare) - 1]
        return char

    def _in_string(self, char: str) -> str:
        if self._escape > 1:  # \uXXXX
            if char not in _HEX:
                raise Malformed
            self._escape -= 1
            if self._escape == 1:
                self._escape = 0
        elif self._escape:
            self._escape = 5 if char == "u" else 0
            if char != "u" and char not in _ESCAPED:
                return _NO_ESCAPE.get(char, "\\" + json.dumps(char, ensure_ascii=False)[1:-1])
        elif char == "\\":
            self._escape = 1
        elif char == '"':
            self.expect = Expect.COLON if self.is_key else Expect.NEXT
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char

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
