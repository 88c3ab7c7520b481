"""Grammars that constrain a request's output: plain data, and the checks that need no compiler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.core.checks import boolean
from forerun.core.errors import RequestError, shown

MAX_GRAMMAR_LENGTH = 1 << 17  # characters of a schema, a regex, a grammar or a structural tag
MAX_JSON_DEPTH = 64  # levels of a schema: compiling takes time cubic in them
JSON_SCHEMA, REGEX, EBNF, STRUCTURAL_TAG = KINDS = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)
GRAMMAR_PARAMS = (*KINDS, "json_object")
_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match. `kind` is one of `KINDS`, `text` its source."""

    kind: str
    text: str


def grammar_source(name: str, value: Any) -> str | None:
    """The text of a grammar parameter; JSON (schemas, structural tags) may be given as a dict.

    Raises:
        RequestError: not text, not JSON, too long or too deep.
    """
    if value is None:
        return None
    if name in (JSON_SCHEMA, STRUCTURAL_TAG):
        value = json_text(name, value)
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {shown(value)}.")
    if len(value) > MAX_GRAMMAR_LENGTH:
        raise RequestError(
            f"{name} has {len(value)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has a lone surrogate, {shown(value[error.start])}, which is not a character;"
            " remove it."
        ) from None
    return value


def json_text(name: str, value: Any) -> str:
    """JSON on one line, in the order given.

    Raises:
        RequestError: it is not JSON, or has too many levels; `name` says what.
    """
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR_LENGTH:
            return value  # refused by the caller
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is not valid JSON: {_reason(error)}.") from None
    if not isinstance(value, Mapping | bool):
        raise RequestError(f"{name} must be a JSON object, or its text, got {shown(value)}.")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{name} is not valid JSON: {_reason(error)}.") from None
    depth = _depth(text)
    if depth > MAX_JSON_DEPTH:
        raise RequestError(
            f"{name} has {depth} levels of objects and lists; at most {MAX_JSON_DEPTH} are allowed."
        )
    return text


def grammar_of(params: Mapping[str, Any]) -> Grammar | None:
    """The grammar among a request's parameters `GRAMMAR_PARAMS`, if any.

    Raises:
        RequestError: there are several.
    """
    asked = boolean("json_object", params["json_object"], RequestError)
    given = [name for name in KINDS if params[name] is not None] + ["json_object"] * asked
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are set; an output follows one grammar only.")
    if not given:
        return None
    (kind,) = given
    return Grammar(JSON_SCHEMA, _ANY_OBJECT) if asked else Grammar(kind, params[kind])


def _depth(text: str) -> int:
    """The most objects and lists within each other, of valid JSON."""
    depth = deepest = 0
    quoted = escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif quoted:
            escaped, quoted = character == "\\", character != '"'
        elif character == '"':
            quoted = True
        elif character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth -= 1
    return deepest


def _reason(error: Exception) -> str:
    return "it is too deep" if isinstance(error, RecursionError) else str(error).rstrip(".")
