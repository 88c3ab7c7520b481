"""The grammar of a whole output: reasoning, then tool calls or an answer. A structural tag.

Formats are those of xgrammar's structural tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forerun.core.errors import RequestError, shown
from forerun.core.grammar import (
    EBNF,
    GRAMMAR_PARAMS,
    JSON_SCHEMA,
    MAX_GRAMMAR_LENGTH,
    REGEX,
    Grammar,
    json_text,
)
from forerun.core.sampling_params import SamplingParams
from forerun.grammar.json_schema import exact_schema
from forerun.server.openai.literal_grammar import gemma_arguments, python_arguments
from forerun.server.openai.output_format import OutputFormat
from forerun.server.openai.tag_formats import (
    Format,
    either,
    json_schema,
    optional,
    regex,
    sequence,
    text,
)
from forerun.server.openai.tools import Function, ToolUse
from forerun.server.parsers.call_syntax import CallSyntax, Style
from forerun.server.parsers.harmony import HARMONY
from forerun.server.parsers.reasoning import ReasoningSyntax

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_GRAMMAR: dict[str, Any] = dict.fromkeys(GRAMMAR_PARAMS) | {"json_object": False}


def with_output_grammar(
    params: SamplingParams, use: ToolUse, form: OutputFormat, thinks: bool | None
) -> SamplingParams:
    """Parameters whose grammar is that of the whole output.

    Args:
        params: their grammar, if any, is that of the answer.
        thinks: as `OutputFormat.begins_in_reasoning`.

    Raises:
        RequestError: the arguments of a function cannot be enforced.
    """
    answer = params.grammar
    strict = any(function.strict for function in use.functions)
    alone = not use.names and thinks is None and not form.is_harmony
    if not use.required and not strict and (answer is None or alone):
        return params  # it is the answer's, if there is one
    body = _body(use, form, answer)
    if thinks is not None and form.reasoning_syntax is not None:
        marks = form.tools.markers if use.functions and form.tools is not None else ()
        body = sequence(_reasoning(form.reasoning_syntax, thinks, marks), body)
    tag = json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False)
    if len(tag) > MAX_GRAMMAR_LENGTH:
        raise RequestError(
            f"The grammar of the output has {len(tag)} characters; at most {MAX_GRAMMAR_LENGTH} are"
            " allowed. Give fewer tools, or smaller parameters."
        )
    return replace(params, **{**_NO_GRAMMAR, "structural_tag": tag})


def _body(use: ToolUse, form: OutputFormat, answer: Grammar | None) -> Format:
    """What follows reasoning."""
    given = None
    if answer is not None:
        given = sequence(text(HARMONY.answer if form.is_harmony else ""), _format_of(answer))
    if use.functions:
        assert form.tools is not None
        calls = _Calls(use, form.tools.syntax)
        if use.required:
            return calls.alone()
        return calls.in_text() if given is None else either(calls.alone(), given)
    assert given is not None
    return given


class _Calls:
    """Calls of the functions, in the model's syntax."""

    def __init__(self, use: ToolUse, syntax: CallSyntax) -> None:
        self._use, self._syntax = use, syntax
        self._parallel = use.parallel and not syntax.single

    def alone(self) -> Format:
        """An answer of calls."""
        syntax = self._syntax
        opening = "" if syntax.bare else syntax.opening
        if syntax.one_each:
            return self._several([self._call(f, opening) for f in self._use.functions])
        leads = either(*map(text, syntax.leads or ("",)))
        return sequence(leads, text(opening), self._after_opening())

    def in_text(self) -> Format:
        """Free text; what follows an opening is calls."""
        syntax, calls = self._syntax, self._after_opening()
        free = {
            "type": "dispatch",
            "rules": [[syntax.opening, calls]],
            "loop": self._parallel,
            "excludes": list(syntax.tolerated),
        }
        if not syntax.bare:
            return free
        # What could be taken for calls without an opening does not begin a text.
        opened = sequence(optional(text(syntax.opening)), calls)
        bare = "".join(f"\\{char}" for char in syntax.bare)
        others = sequence(regex(f"[^{bare}\\s{syntax.opening[0]}]"), free)
        return optional(either(opened, others))

    def _after_opening(self) -> Format:
        calls = [self._call(function) for function in self._use.functions]
        if self._syntax.one_each:
            return either(*calls)
        inner, closing = text(self._syntax.inner), text(self._syntax.closing)
        return sequence(inner, self._several(calls), closing)

    def _several(self, calls: list[Format]) -> Format:
        return {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": self._syntax.separator,
            "at_least_one": True,
            "stop_after_first": not self._parallel,
        }

    def _call(self, function: Function, opening: str = "") -> Format:
        syntax = self._syntax
        before, after = syntax.begin
        begin = f"{opening}{before}{syntax.prefix}{function.name}"
        content = self._arguments(function)
        if syntax.number:
            number = regex("[0-9]{1,3}")
            content = sequence(text(syntax.number), number, text(after), content)
        elif syntax.others:
            content = sequence(either(*map(text, (after, *syntax.others))), content)
        else:
            begin += after
        end = syntax.end + syntax.closing if syntax.one_each else syntax.end
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    def _arguments(self, function: Function) -> Format:
        enforced = self._use.required or bool(function.strict)
        schema = _parameters(function) if enforced else _ANY_OBJECT
        try:
            match self._syntax.style:
                case Style.PYTHON:
                    return python_arguments(schema)
                case Style.GEMMA:
                    return gemma_arguments(schema)
                case style:
                    return json_schema(schema, style.value)
        except RequestError as error:
            what = f"The schema of the function {shown(function.name)}"
            raise RequestError(f"{what} cannot be enforced: {error}.") from None


def _parameters(function: Function) -> Mapping[str, Any]:
    """The schema of the arguments, which are an object.

    Raises:
        RequestError: it cannot be enforced.
    """
    what = f"The schema of the function {shown(function.name)}"
    schema = {**_ANY_OBJECT, **(function.parameters or {})}
    if schema["type"] != "object":
        raise RequestError(f"{what} must have the type 'object', got {shown(schema['type'])}.")
    json_text(what, schema)
    try:
        exact_schema(schema)
    except RequestError as error:
        raise RequestError(f"{what} cannot be enforced: {error}") from None
    return schema


def _format_of(grammar: Grammar) -> Format:
    """The grammar of an answer, as a part of a structural tag."""
    if grammar.kind == REGEX:
        return regex(grammar.text)
    if grammar.kind == EBNF:
        return {"type": "grammar", "grammar": grammar.text}
    value = json.loads(grammar.text)
    if grammar.kind == JSON_SCHEMA:
        return {"type": "json_schema", "json_schema": value}
    inner = value.get("format")
    if not isinstance(inner, dict):
        raise RequestError(
            "structural_tag: beside tools or reasoning it must have a format, as xgrammar's; the"
            " form with structures and triggers is taken alone only."
        )
    return inner


def _reasoning(syntax: ReasoningSyntax, opened: bool, excluded: Sequence[str]) -> Format:
    """Up to its end.

    Args:
        opened: it has begun, else there may be none.
        excluded: what calls begin with: at the end of reasoning they would be read.
    """
    begin = text(syntax.begin[0])
    content = {"type": "any_text", "excludes": list(excluded)}
    ended = {"type": "tag", "begin": "", "content": content, "end": syntax.end[0]}
    following = regex(syntax.following) if syntax.following else text("")
    if opened:  # some models begin it again
        return sequence(optional(begin), ended, following)
    return optional(sequence(regex("\\n?"), begin, ended, following))  # GLM begins with a break
