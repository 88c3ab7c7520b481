"""The whole output of gpt-oss: messages in channels (OpenAI's harmony format).

    <|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary
    to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is warm.<|return|>

The library openai-harmony parses the ids of its own vocabulary, which it downloads; here outputs
are text, of any tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forerun.server.parsers.call_syntax import CallSyntax
from forerun.server.parsers.events import Reasoning, Text
from forerun.server.parsers.json_object import Malformed
from forerun.server.parsers.reasoning import ReasoningSyntax
from forerun.server.parsers.scanner import Reading
from forerun.server.parsers.tool_parser import ToolParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_ENDS = (END, CALL, RETURN)
_BEGINNINGS = (CHANNEL, START, "to=functions.")  # of headers
_HEADER_MARKS = (CHANNEL, START, MESSAGE, "<|constrain|>")
_RECIPIENT = re.compile(r"to=(?:(functions\.)?([^\s<]+))")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER = 512  # characters
_LEADING = re.compile(  # the messages of reasoning that an output begins with
    r"(?:\s*(?:<\|start\|>assistant)?\s*<\|channel\|>analysis\s*<\|message\|>.*?"
    r"(?:<\|end\|>|(?=<\|start\|>|<\|channel\|>)|(\Z)))+",
    re.DOTALL,
)


class HarmonySyntax(ReasoningSyntax):
    """Reasoning is the messages of the channel "analysis"."""

    def begins_in(self, prompt_tail: str) -> bool | None:
        return False

    def length(self, text: str, opened: bool) -> int | None:
        match = _LEADING.match(text)
        if match is None:
            return 0
        return match.end() if match[1] is None else None


HARMONY = HarmonySyntax(
    begin=(ANALYSIS,),
    end=(END,),
    following="<\\|start\\|>assistant",
    answer=f"{CHANNEL}final{MESSAGE}",
)


class HarmonyParser(ToolParser):
    """Reads calls, reasoning and answers. Text without marks is an answer.

    What is neither a message for the user nor a call of a known function stays as it is, with its
    marks.
    """

    markers = (CHANNEL, START, MESSAGE)
    syntax = CallSyntax(
        opening="to=functions.",
        begin=("", f" <|constrain|>json{MESSAGE}"),
        others=(
            f" json{MESSAGE}",
            f" code{MESSAGE}",  # gpt-oss calls JSON so, too
            f"{CHANNEL}commentary json{MESSAGE}",
            f"{CHANNEL}commentary <|constrain|>json{MESSAGE}",
        ),
        leads=(f"{CHANNEL}commentary ", " "),
        end="",
        single=True,
    )

    def __init__(
        self, functions: Mapping[str, Mapping[str, Any]], separate_reasoning: bool = True
    ) -> None:
        """`separate_reasoning`: else it is text, with its marks."""
        self._separate = separate_reasoning
        self._thought = False  # reasoning has been read
        super().__init__(functions)

    def _read(self) -> Reading[None]:
        yield from self._spaces()
        while self._char:
            header = yield from self._header()
            if header:
                held = yield from self._guarded(self._message(header))
                self._raw = [held] if held else self._raw
            elif header is None:
                held, self._raw = "".join(self._raw), []
                yield from self._body(Text, held)

    def _calls(self) -> Reading[None]:
        raise AssertionError("calls are messages here")
        yield

    def _header(self) -> Reading[str | None]:
        """What stands before a message, with its mark.

        Returns:
            None: this is no header; "": the text ends within one, which is left out.
        """
        read = "".join(self._raw).strip()
        while not read.endswith(MESSAGE):
            if not self._char and read.startswith("<|"):
                return ""
            if not self._char or len(read) > _MAX_HEADER or not _may_begin(read + self._char):
                return None
            read += self._char
            yield from self._consume()
        return read

    def _message(self, header: str) -> Reading[None]:
        """A message after its header.

        Raises:
            Malformed: it is neither for the user nor a call.
        """
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None:
            if recipient[1] is None:
                raise Malformed
            yield from self._function_call(recipient[2])
        elif channel is not None and channel[1] == "analysis":
            yield from self._analysis()
        elif channel is not None and channel[1] in ("final", "commentary"):
            yield from self._body(Text)
        else:
            raise Malformed

    def _function_call(self, name: str) -> Reading[None]:
        self._announce(name)
        yield from self._spaces()
        if self._char == "{":
            yield from self._arguments()
        elif self._char in ("", "<"):  # none; the text may as well have ended too early
            if not self._char:
                raise Malformed
            self._argue("{}")
            self._complete()
        yield from self._closing(*_ENDS)
        self._raw = []

    def _analysis(self) -> Reading[None]:
        if not self._separate:
            header = "".join(self._raw)
            yield from self._body(Text, header, shows_end=True)
            return
        if self._thought:
            self._events.append(Reasoning("\n"))
        self._thought = True
        yield from self._body(Reasoning)

    def _body(
        self, kind: type[Text | Reasoning], held: str = "", shows_end: bool = False
    ) -> Reading[None]:
        """The text of a message, up to what ends it or begins another one.

        Args:
            held: text before it.
            shows_end: what ends it is text, too.
        """
        self._raw, self._trims = [], False
        mark = (yield from self._text((*_ENDS, START, CHANNEL), kind, held)).strip()
        if mark in (START, CHANNEL):
            self._raw = [mark]
        elif shows_end:
            self._emit(Text, mark)


def _may_begin(text: str) -> bool:
    """Whether a header may begin like this."""
    if not any(text.startswith(word) or word.startswith(text) for word in _BEGINNINGS):
        return False
    mark = text[text.rfind("<") :] if "<" in text else ""
    return any(mark.startswith(word) or word.startswith(mark) for word in _HEADER_MARKS)
