"""A tool call that is a JSON object: {"name": ..., "arguments": {...}}, in any order.

Models of all families write "parameters" at times, as Llama does, and "function" for the name, or
for an object with both.
"""

from __future__ import annotations

from forerun.server.parsers.json_object import Expect, JsonScanner, Malformed, decoded_string

NAME, ARGUMENTS = "name", "arguments"
_READ_KEYS = (NAME, ARGUMENTS)
_KINDS = {"function": NAME, "parameters": ARGUMENTS}  # what others mean
IGNORED_KEYS = ("id", "type")


class CallObject:
    """Takes the object's characters; the name and the arguments are there as soon as they are read.

    Arguments are an object, a string that holds one or nothing, or null. Arguments before the name
    wait.
    """

    def __init__(self, tolerant: bool = False) -> None:
        """`tolerant`: other keys are passed over."""
        self._tolerant = tolerant
        self.name: str | None = None
        self._json = JsonScanner()
        self._seen: set[str] = set()
        self._key = ""
        self._inner: CallObject | None = None  # the whole call, as the function
        self._string: list[str] | None = None  # of a key, or of a value that is needed
        self._streams = False  # inside the arguments
        self._waiting: list[str] = []  # arguments to take
        self._has_arguments = False

    @property
    def done(self) -> bool:
        return self._json.done

    @property
    def lacks_brace(self) -> bool:
        """Whether the arguments are complete, and nothing but the last brace may follow."""
        alone = self._json.depth == 1 and self._json.expect is Expect.NEXT
        return alone and self.name is not None and self._has_arguments

    def push(self, char: str) -> None:
        """
        Raises:
            Malformed: no call goes on like this.
        """
        scanner = self._json
        before, depth = scanner.expect, scanner.depth
        written = scanner.push(char)
        if self._inner is not None:
            self._push_inner(self._inner, char)
        elif self._streams:
            self._waiting.append(written)
            self._streams = scanner.depth > 1
        elif depth == 1:
            self._at_top(written, before)
        if scanner.done:
            if self.name is None:
                raise Malformed
            if not self._has_arguments:
                self._waiting.append("{}")

    def _push_inner(self, call: CallObject, char: str) -> None:
        call.push(char)
        self.name = call.name
        self._waiting.append(call.take())
        if call.done:
            self._inner, self._has_arguments = None, True

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
            if before in (Expect.KEY, Expect.FIRST_KEY) or self._key in _READ_KEYS:
                self._string = [char]
        elif before is Expect.VALUE and scanner.expect is not Expect.VALUE:
            self._on_value(char)

    def _on_string(self, value: str, is_key: bool) -> None:
        if is_key:
            kind = _KINDS.get(value, value)
            known = value in IGNORED_KEYS or kind in (NAME, ARGUMENTS)
            if kind in self._seen or not (known or self._tolerant):
                raise Malformed
            self._seen.add(kind)
            self._key = kind
        elif self._key == NAME:
            self.name = value
        elif value.strip():
            self._waiting.append(_checked_object(value))
            self._has_arguments = True

    def _on_value(self, char: str) -> None:
        """A value begins that is not a string."""
        if self._key == NAME:
            if char != "{" or ARGUMENTS in self._seen:
                raise Malformed
            self._seen.add(ARGUMENTS)
            self._inner = CallObject(self._tolerant)
            self._push_inner(self._inner, char)
        if self._key == ARGUMENTS and char != "n":  # null: none
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
    written = ""
    for char in text.strip():
        if scanner.done:
            raise Malformed
        written += scanner.push(char)
    if not scanner.done:
        raise Malformed
    return written
