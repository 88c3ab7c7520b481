"""Where a piece of code or JSON ends, though it may be malformed."""

from __future__ import annotations

_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "\"'"


class Brackets:
    """Counts the brackets that are open, outside of strings. A line break ends a string."""

    def __init__(self) -> None:
        self.depth = 0
        self.quote = ""  # of the string that is being read
        self._escaped = False

    def push(self, char: str) -> None:
        if char == "\n":
            self.quote, self._escaped = "", False
        elif self._escaped:
            self._escaped = False
        elif self.quote:
            self._escaped = char == "\\"
            self.quote = "" if char == self.quote else self.quote
        elif char in _QUOTES:
            self.quote = char
        else:
            self.depth += (char in _OPENING) - (char in _CLOSING)
