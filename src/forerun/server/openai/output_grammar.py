"""The grammar of a whole output: reasoning, then tool calls or an answer. A structural tag.

Formats are those of xgrammar's structural tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from forerun.server.openai.tools import Function, ToolUse
from forerun.server.parsers import reasoning
from forerun.server.parsers.call_syntax import CallSyntax

Format = dict[str, Any]
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_GRAMMAR: dict[str, Any] = dict.fromkeys(GRAMMAR_PARAMS) | {"json_object": False}


def with_output_grammar(
    params: SamplingParams, use: ToolUse, syntax: CallSyntax | None, thinks: bool | None
) -> SamplingParams:
    """Parameters whose grammar is that of the whole output.

    Args:
        params: their grammar, if any, is that of the answer.
        syntax: of calls; not needed without functions.
        thinks: as `OutputFormat.begins_in_reasoning`.

    Raises:
        RequestError: the arguments of a function cannot be enforced.
    """
    answer = params.grammar
    strict = any(function.strict for function in use.functions)
    if not use.required and not strict and (answer is None or (not use.names and thinks is None)):
        return params  # it is the answer's, if there is one
    if use.required:
        assert syntax is not None
        body = _answer_of_calls(use, syntax)
    elif use.functions:
        assert syntax is not None
        body = _text_with_calls(use, syntax) if answer is None else _either(answer, use, syntax)
    else:
        assert answer is not None
        body = _format_of(answer)
    if thinks is not None:
        body = _sequence(_reasoning(thinks), body)
    tag = json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False)
    if len(tag) > MAX_GRAMMAR_LENGTH:
        raise RequestError(
            f"The grammar of the output has {len(tag)} characters; at most {MAX_GRAMMAR_LENGTH} are"
            " allowed. Give fewer tools, or smaller parameters."
        )
    return replace(params, **{**_NO_GRAMMAR, "structural_tag": tag})


def _answer_of_calls(use: ToolUse, syntax: CallSyntax) -> Format:
    opening = "" if syntax.bare else syntax.opening
    if syntax.one_each:
        return _several(use, syntax, [_call(f, use, syntax, opening) for f in use.functions])
    return _sequence(_text(opening), _after_opening(use, syntax))


def _text_with_calls(use: ToolUse, syntax: CallSyntax) -> Format:
    """Free text; what follows an opening is calls."""
    calls = _after_opening(use, syntax)
    text = {"type": "dispatch", "rules": [[syntax.opening, calls]], "loop": use.parallel}
    if not syntax.bare:
        return text
    # What could be taken for calls without an opening does not begin a text.
    opened = _sequence(_optional(_text(syntax.opening)), calls)
    others = _sequence(_regex(f"[^{{\\s{syntax.opening[0]}]"), text)
    return _optional(_or(opened, others))


def _either(answer: Grammar, use: ToolUse, syntax: CallSyntax) -> Format:
    return _or(_answer_of_calls(use, syntax), _format_of(answer))


def _after_opening(use: ToolUse, syntax: CallSyntax) -> Format:
    calls = [_call(function, use, syntax) for function in use.functions]
    if syntax.one_each:
        return _or(*calls)
    return _sequence(_several(use, syntax, calls), _text(syntax.closing))


def _several(use: ToolUse, syntax: CallSyntax, calls: list[Format]) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": not use.parallel,
    }


def _call(function: Function, use: ToolUse, syntax: CallSyntax, opening: str = "") -> Format:
    before, after = syntax.begin
    enforced = use.required or bool(function.strict)
    arguments = {
        "type": "json_schema",
        "json_schema": _parameters(function) if enforced else _ANY_OBJECT,
        "max_whitespace_cnt": 1,  # small models write spaces without end
    }
    begin = f"{opening}{before}{function.name}{after}"
    end = syntax.end + syntax.closing if syntax.one_each else syntax.end
    return {"type": "tag", "begin": begin, "content": arguments, "end": end}


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
        return _regex(grammar.text)
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


def _reasoning(opened: bool) -> Format:
    """Up to its end; `opened`: it has begun, else there may be none."""
    begin, text = _text(reasoning.BEGIN), {"type": "any_text"}
    ended = {"type": "tag", "begin": "", "content": text, "end": reasoning.END}
    space = _regex("\\n{0,2}")
    if opened:  # some models begin it again
        return _sequence(_optional(begin), ended, space)
    return _optional(_sequence(begin, ended, space))


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _sequence(*elements: Format) -> Format:
    """Makes a sequence without empty texts."""
    kept = [each for each in elements if each != _text("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def _or(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}
