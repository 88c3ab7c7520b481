"""A tool call that is a JSON object: {"name": ..., "arguments": {...}}, in any order.

Models of all families write "parameters" at times, as Llama does.
"""

from __future__ import annotations

from forerun.server.parsers.json_object import Expect, JsonScanner, Malformed, decoded_string

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
IGNORED_KEYS = ("id", "type")


class CallObject:
    """Takes the object's characters; the name and the arguments are there as soon as they are read.

    Arguments are an object, a string that holds one or nothing, or null. Arguments before the name
    wait.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._json = JsonScanner()
        self._seen: set[str] = set()
        self._key = ""
        self._string: list[str] | None = None  # of a key, or of a value that is needed
        self._streams = False  # inside the arguments
        self._waiting: list[str] = []  # arguments to take
        self._has_arguments = False

    @property
    def done(self) -> bool:
        return self._json.done

    def push(self, char: str) -> None:
        """
        Raises:
            Malformed: no call goes on like this.
        """
        scanner = self._json
        before, depth = scanner.expect, scanner.depth
        scanner.push(char)
        if self._streams:
            self._waiting.append(char)
            self._streams = scanner.depth > 1
        elif depth == 1:
            self._at_top(char, before)
        if scanner.done:
            if self.name is None:
                raise Malformed
            if not self._has_arguments:
                self._waiting.append("{}")

    def take(self) -> str:
        """New arguments; none before the name is known."""
        if self.name is None:
            return ""
        text, self._waiting = "".join(self._waiting), []
        return text

    def _at_top(self, char: str, before: Expect) -> None:
        """A character outside the values' own objects and lists."""
        scanner = self._json
        if self._string is not None:
            self._string.append(char)
            if scanner.expect is not Expect.STRING:
                raw, self._string = "".join(self._string), None
                self._on_string(decoded_string(raw), is_key=scanner.is_key)
        elif scanner.expect is Expect.STRING:
            if before in (Expect.KEY, Expect.FIRST_KEY) or self._key not in IGNORED_KEYS:
                self._string = [char]
        elif before is Expect.VALUE and scanner.expect is not Expect.VALUE:
            self._on_value(char)

    def _on_string(self, value: str, is_key: bool) -> None:
        if is_key:
            known = (NAME, *ARGUMENTS, *IGNORED_KEYS)
            kind = "arguments" if value in ARGUMENTS else value
            if value not in known or kind in self._seen:
                raise Malformed
            self._seen.add(kind)
            self._key = value
        elif self._key == NAME:
            self.name = value
        elif value.strip():
            self._waiting.append(_checked_object(value))
            self._has_arguments = True

    def _on_value(self, char: str) -> None:
        """A value begins that is not a string."""
        if self._key == NAME:
            raise Malformed
        if self._key in ARGUMENTS and char != "n":  # null: none
            if char != "{":
                raise Malformed
            self._has_arguments = self._streams = True
            self._waiting.append(char)


def _checked_object(text: str) -> str:
    """
    Raises:
        Malformed: the text is not a JSON object.
    """
    scanner = JsonScanner()
    for char in text.strip():
        if scanner.done:
            raise Malformed
        scanner.push(char)
    if not scanner.done:
        raise Malformed
    return text.strip()
