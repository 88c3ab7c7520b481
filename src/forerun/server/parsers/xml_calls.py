"""Tool calls whose arguments are elements, of which a string has no quotes and no escapes.

Qwen3-Coder and Qwen 3.5:  <tool_call>
                           <function=get_weather>
                           <parameter=city>
                           Paris
                           </parameter>
                           </function>
                           </tool_call>
GLM 4.5 and later:         <tool_call>get_weather
                           <arg_key>city</arg_key>
                           <arg_value>Paris</arg_value>
                           </tool_call>
MiniMax M2:                <minimax:tool_call>
                           <invoke name="get_weather">
                           <parameter name="city">Paris</parameter>
                           </invoke>
                           </minimax:tool_call>
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import ClassVar

from forerun.server.parsers.argument_values import (
    STRING,
    allowed_types,
    ends_in_string,
    escaped,
    fitting,
    property_schema,
    restricted,
    typed,
)
from forerun.server.parsers.call_syntax import CallSyntax, Style
from forerun.server.parsers.json_object import Malformed
from forerun.server.parsers.marked_calls import MarkedCallParser
from forerun.server.parsers.object_calls import ObjectCallParser
from forerun.server.parsers.scanner import Reading
from forerun.server.parsers.tool_parser import ToolParser

_GLM_CALL = re.compile(r"<tool_call>[\w.-]+(\n|<)")


@dataclass(frozen=True)
class XmlSyntax:
    """How an argument is written: `key[0] name key[1] value[0] value value[1]`.

    The last part is missing at times; a mark on the next line ends a value, too.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    lines: bool = False  # values are lines of their own


class XmlCallParser(MarkedCallParser, ObjectCallParser):
    xml: ClassVar[XmlSyntax]

    def _written_arguments(self) -> Reading[str]:
        ends = tuple(filter(None, (self.syntax.end.strip(), self.syntax.closing.strip())))
        begin = self.xml.key[0]
        keys: set[str] = set()
        word = yield from self._mark(begin, *ends)
        while word == begin:
            key = _unquoted((yield from self._name(self.xml.key[1][0])))
            yield from self._literal(self.xml.key[1])
            if key in keys:
                raise Malformed
            self._argue(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
            yield from self._word(self.xml.value[0])
            word = yield from self._value(key, begin, *ends)
            if word == self.xml.value[1]:
                word = yield from self._mark(begin, *ends, *self.markers)
        self._argue("}" if keys else "{}")
        self._complete()
        return word

    def _calls(self) -> Reading[None]:
        yield from self._spaces()
        if self._marker != self.syntax.opening or self._char != "{":
            yield from super()._calls()
            return
        yield from self._objects()  # as Hermes' models call
        yield from self._closing(self.syntax.closing.strip())

    def _call_name(self) -> Reading[str]:
        name = yield from self._name(self.name_ends)
        yield from self._words(self.syntax.begin[1].strip().removeprefix('"'))
        return name

    def _function(self, name: str) -> str:
        return _unquoted(name)

    def _mark(self, *words: str) -> Reading[str]:
        """One of `words`. Ends of values, with no value before them, are passed over."""
        end = self.xml.value[1]
        word = end
        while word == end:
            yield from self._spaces()
            word = yield from self._literal(*words, end)
        return word

    def _value(self, key: str, *following: str) -> Reading[str]:
        """A value, emitted as it comes where it can only be a string.

        Returns:
            What ended it.
        """
        assert self._announced is not None
        root = self._functions[self._announced]
        schema = property_schema(root, key)
        types, asked = allowed_types(schema, root), restricted(schema, root)
        end = self.xml.value[1]
        words = (end, *(f"\n{word}" for word in (end, *following)))
        line = ""
        if self.xml.lines and self._char == "\n":
            line = "\n"
            yield from self._consume()
        if types == {STRING} and asked is None:
            self._argue('"')
            word = yield from self._until(words, lambda text: self._argue(escaped(text)))
            self._argue(escaped(self._last_break(word)) + '"')
        else:
            text, word = yield from self._whole_value(words)
            text += self._last_break(word)
            if asked is not None and STRING in types:
                text = fitting(text, line + text + word.removesuffix(word.lstrip()), asked)
            self._argue(typed(text, types))
        return word.removeprefix("\n")

    def _last_break(self, word: str) -> str:
        """The line break before what ended a value, where it is part of that."""
        return "\n" if not self.xml.lines and word == f"\n{self.xml.value[1]}" else ""

    def _whole_value(self, words: tuple[str, ...]) -> Reading[tuple[str, str]]:
        """A value, and which of `words` ended it: not one in a string of JSON."""
        text = word = ""
        while not word or ends_in_string(text):
            parts = [word]
            word = yield from self._until(words, parts.append)
            text += "".join(parts)
        return text, word


def _unquoted(name: str) -> str:
    return name[1:-1] if name[:1] in ("'", '"') and name[-1:] == name[:1] else name


class Qwen3CoderParser(XmlCallParser):
    """Any mark around a function may be missing."""

    markers = ("<tool_call>", "<function=")  # the model leaves out the first one at times
    name_ends = ">"
    xml = XmlSyntax(("<parameter=", ">"), ("", "</parameter>"), lines=True)
    syntax = CallSyntax(
        opening="<tool_call>",
        begin=("\n<function=", ">\n"),
        end="</function>\n",
        closing="</tool_call>",
        separator="\n",
        one_each=True,
        style=Style.QWEN_XML,
        tolerated=("<function=",),
    )


class GlmParser(XmlCallParser):
    """GLM 4.7 and later, which write no line breaks."""

    markers = ("<tool_call>",)
    name_ends = "<\n"
    xml = XmlSyntax(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))
    syntax = CallSyntax(
        opening="<tool_call>",
        begin=("", ""),
        end="",
        closing="</tool_call>",
        one_each=True,
        style=Style.GLM_XML,
    )

    @classmethod
    def written_as(cls, template: str) -> type[ToolParser]:
        match = _GLM_CALL.search(template)
        if match is None:
            return cls
        return Glm45Parser if match[1] == "\n" else GlmParser


class Glm45Parser(GlmParser):
    """GLM 4.5 and 4.6."""

    syntax = replace(GlmParser.syntax, begin=("", "\n"), separator="\n")


class MiniMaxM2Parser(XmlCallParser):
    """Names may have quotes of either kind, or none."""

    markers = ("<minimax:tool_call>", "<invoke")
    begin = "<invoke name="
    name_ends = ">"
    xml = XmlSyntax(("<parameter name=", ">"), ("", "</parameter>"))
    syntax = CallSyntax(
        opening="<minimax:tool_call>",
        begin=('\n<invoke name="', '">\n'),
        end="</invoke>",
        closing="\n</minimax:tool_call>",
        style=Style.MINIMAX_XML,
        tolerated=("<invoke",),
    )
