"""The base of the parsers of tool calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from forerun.server.parsers.brackets import Brackets
from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.events import Arguments, CallBroken, CallEnd, CallStart, Text
from forerun.server.parsers.json_object import JsonScanner, Malformed
from forerun.server.parsers.scanner import SPACES, Reading, Scanner, split_before

MAX_NAME_LENGTH = 256


class ToolParser(Scanner):
    """Text with tool calls in one of the formats that models write.

    A call is announced as soon as the name of its function is known, and its arguments are emitted
    as they come. What is not a call of a known function is text, with its markers. Spaces around
    calls are left out.
    """

    markers: ClassVar[tuple[str, ...]]  # what calls begin with
    syntax: ClassVar[CallSyntax]
    call_id: ClassVar[str] = ""  # how templates want ids of calls: of {name} and {index}

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: those that may be called, by name, with the schemas of their arguments."""
        self._functions = functions
        self._raw: list[str] = []  # consumed, and not emitted as text or as a complete call
        self._marker = ""  # what the calls that are being read began with
        self._announced: str | None = None  # the call that is being read
        super().__init__()

    def another(self) -> ToolParser:
        """A parser of another text with calls of the same functions."""
        return type(self)(self._functions)

    @classmethod
    def written_as(cls, template: str) -> type[ToolParser]:
        """The parser of the variant of the format that a conversation in the template shows."""
        return cls

    @abstractmethod
    def _calls(self) -> Reading[None]:
        """Reads the calls after a marker.

        Raises:
            Malformed: this is not a call.
        """

    def _beginning(self) -> Reading[str]:
        """Reads calls without a marker, which formats with `syntax.bare` have at the beginning.

        Returns:
            What was consumed and is not emitted yet.
        """
        bare = self.syntax.bare
        if not bare:
            return ""
        yield from self._spaces()
        held, self._raw = "".join(self._raw), []
        if not self._char or self._char not in bare:
            return held
        self._raw = [held]
        return (yield from self._guarded(self._calls()))

    def _read(self) -> Reading[None]:
        held = yield from self._beginning()
        while marker := (yield from self._text(self.markers, held=held)):
            self._raw, self._marker = [marker], marker.strip()
            held = yield from self._guarded(self._calls())

    def _guarded(self, calls: Reading[None]) -> Reading[str]:
        """Reads calls; what is malformed becomes text, and reading goes on after that.

        Returns:
            What was consumed and is not emitted yet: the next marker may have begun in it.
        """
        try:
            yield from calls
            return ""
        except Malformed:
            self._break()
            beginnings = {marker[:n] for marker in self.markers for n in range(1, len(marker))}
            text = split_before("".join(self._raw), beginnings)[0].rstrip(" \t\r\n")
            held = "".join(self._raw)[len(text) :]
            self._emit(Text, text, self._at - len(held))
            self._raw = []
            return held

    def _sibling(self, call: Reading[None]) -> Reading[bool]:
        """Reads one of several calls; what is malformed becomes text, up to its outer bracket.

        Returns:
            Whether it is a call.

        Raises:
            Malformed: it has no bracket, or a mark may begin in it.
        """
        begin = len(self._raw)
        try:
            yield from call
            return True
        except Malformed:
            brackets = Brackets()
            for char in "".join(self._raw[begin:]):
                brackets.push(char)
            if not brackets.depth:
                raise
            self._break()
        while self._char and brackets.depth:
            if self._char == "<" and not brackets.quote:
                raise Malformed
            brackets.push(self._char)
            yield from self._consume()
            self._flush()
        self._flush()
        return False

    def _siblings(self, call: Callable[[], Reading[None]], closing: str = "]") -> Reading[None]:
        """Calls with commas between them up to `closing`, which may be missing at the end.

        Raises:
            Malformed: something else.
        """
        word, found = ",", False
        while word == ",":
            yield from self._spaces()
            if found and self._char == closing:  # after a comma
                yield from self._consume()
                break
            if is_call := (yield from self._sibling(call())):
                self._raw, found = [], True
            word = yield from self._closing(",", closing, missing=found)
            self._raw = [] if is_call else self._raw
        if not found:
            raise Malformed
        self._raw = []

    def _break(self) -> None:
        """The announced call, if there is one, is malformed."""
        if self._announced is not None:
            self._events.append(CallBroken(cut=not self._char))
        self._announced = None

    def _flush(self) -> None:
        """What was consumed is text."""
        self._emit(Text, "".join(self._raw))
        self._raw = []

    # --- pieces of formats ----------------------------------------------------------------------

    def _consume(self) -> Reading[None]:
        self._raw.append(self._char)
        yield

    def _spaces(self) -> Reading[None]:
        while self._char and self._char in SPACES:
            yield from self._consume()

    def _literal(self, *words: str) -> Reading[str]:
        """One of `words`, of which none begins like another one up to its last character.

        Raises:
            Malformed: something else.
        """
        read = ""
        while read not in words:
            read += self._char
            if not self._char or not any(word.startswith(read) for word in words):
                raise Malformed
            yield from self._consume()
        return read

    def _word(self, word: str) -> Reading[None]:
        """A word after spaces; none if it is empty.

        Raises:
            Malformed: something else.
        """
        if word:
            yield from self._spaces()
            yield from self._literal(word)

    def _name(self, ends: str) -> Reading[str]:
        """Text before any of the characters `ends`, which is not consumed, without outer spaces.

        Raises:
            Malformed: the text ends, or is too long for a name.
        """
        read = ""
        while not self._char or self._char not in ends:
            read += self._char
            if not self._char or len(read) > MAX_NAME_LENGTH:
                raise Malformed
            yield from self._consume()
        return read.strip()

    def _until(self, words: Collection[str], put: Callable[[str], None]) -> Reading[str]:
        """Gives `put` the text before the first of `words`, and consumes that.

        What a word begins with must not occur in it again. If a word is another one after a line
        break, both must be given.

        Returns:
            The word.

        Raises:
            Malformed: the text ends.
        """
        prefixes = {word[:n] for word in words for n in range(1, len(word) + 1)}
        candidate = ""
        while self._char:
            if candidate + self._char in prefixes:
                candidate += self._char
                yield from self._consume()
                if candidate in words:
                    return candidate
            elif candidate:
                put(candidate)
                candidate = ""
            else:
                put(self._char)
                yield from self._consume()
        raise Malformed

    def _closing(self, *words: str, missing: bool = True) -> Reading[str]:
        """What closes a complete call, after spaces. It is not missed where the text ends.

        Args:
            missing: whether it may be missing there.

        Returns:
            The word that was read; "" where the text has ended.

        Raises:
            Malformed: something else.
        """
        yield from self._spaces()
        try:
            return (yield from self._literal(*words))
        except Malformed:
            if self._char or not missing:
                raise
            self._raw = []
            return ""

    def _arguments(self) -> Reading[None]:
        """The arguments of the announced call: an object, to its end.

        Raises:
            Malformed: something else.
        """
        scanner = JsonScanner()
        while not scanner.done:
            if not self._char:
                raise Malformed
            self._argue(scanner.push(self._char))
            yield from self._consume()
        self._complete()

    def _argue(self, text: str) -> None:
        """More of the announced call's arguments."""
        self._events.append(Arguments(text))

    def _announce(self, name: str) -> None:
        """
        Raises:
            Malformed: there is no such function.
        """
        if name not in self._functions:
            raise Malformed
        self._events.append(CallStart(name))
        self._announced = name

    def _complete(self) -> None:
        self._events.append(CallEnd())
        self._announced = None
        self._trims = True
        self._raw = []
