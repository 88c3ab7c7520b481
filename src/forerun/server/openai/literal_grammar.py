"""Grammars of arguments that are not JSON: Python's and Gemma's, from their JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.core.errors import RequestError, shown
from forerun.server.openai.tag_formats import (
    Format,
    either,
    json_schema,
    optional,
    regex,
    separated,
    sequence,
    text,
)
from forerun.server.parsers.argument_values import allowed_types, target
from forerun.server.parsers.gemma4 import QUOTE

_MAX_NESTING = 16
_MAX_ITEMS = 128  # that are counted; xgrammar counts wrongly beyond
_DEFINITIONS = ("$defs", "definitions")
_ROOT = "arguments"  # the name of the whole schema among the definitions of a part
# That say nothing about the value, or are looked at here.
_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
     "$comment", "$schema", "$id", "type", "enum", "const", "anyOf", "oneOf", "$ref", *_DEFINITIONS}
)  # fmt: skip
_PLAIN = _NOTES - {"const", "anyOf", "oneOf", "$ref"}
_OF_TYPE = {
    "string": frozenset({"pattern"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
}
# A value in Gemma's notation of which a schema says nothing.
_GEMMA_ANYTHING = r"""
root ::= string | number | "true" | "false" | "null" | list | object
string ::= "<|\"|>" ([^<] | "<" [^|<])* "<|\"|>"
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)?
list ::= "[" (root ("," root)*)? "]"
object ::= "{" (pair ("," pair)*)? "}"
pair ::= [A-Za-z_] [A-Za-z0-9_]* ":" root
"""
_KEY = regex("[A-Za-z_][A-Za-z0-9_]*")
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


def python_arguments(schema: Mapping[str, Any]) -> Format:
    """`key=value` with commas between them. Values are Python's literals, or JSON."""

    def pair(key: str | None, value: Any) -> Format:
        name = _KEY if key is None else text(key)
        return sequence(name, text("="), _python_value(value, schema))

    return _pairs(schema, pair, ", ")


def _python_value(schema: Any, root: Mapping[str, Any]) -> Format:
    """JSON, and what Python has instead of words and plain strings."""
    whole = json_schema(_moved(schema, root))
    types = allowed_types(schema, root)
    forms = [whole]
    given = schema if isinstance(schema, Mapping) else {}
    if "boolean" in types and not {"enum", "const"} & given.keys():
        forms += [text("True"), text("False")]
    if "null" in types and not {"enum", "const"} & given.keys():
        forms.append(text("None"))
    if "string" in types:
        forms += _single_quoted(given)
    return either(*forms)


def _moved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema as one of its own; what it refers to comes with it."""
    moved = _with_references_into(schema, f"#/$defs/{_ROOT}")
    if moved == schema:
        return schema
    return {**moved, "$defs": {_ROOT: _with_references_into(root, f"#/$defs/{_ROOT}")}}


def _with_references_into(schema: Any, place: str) -> Any:
    """The schema as part of another one, at `place`."""
    if isinstance(schema, list):
        return [_with_references_into(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: place + value.removeprefix("#")
        if key == "$ref" and isinstance(value, str)
        else _with_references_into(value, place)
        for key, value in schema.items()
    }


def _single_quoted(schema: Mapping[str, Any]) -> list[Format]:
    """The string between single quotes, where nothing is asked of it but to be one of a list."""
    values = schema.get("enum")
    if isinstance(values, list):
        return [text(f"'{v}'") for v in values if isinstance(v, str) and repr(v) == f"'{v}'"]
    return [regex("'[^'\\\\\\n]*'")] if schema.keys() <= _PLAIN else []


def gemma_arguments(schema: Mapping[str, Any]) -> Format:
    """`{key:value,...}`; strings are within marks and have no escapes.

    Raises:
        RequestError: something of the schema cannot be enforced.
    """
    return _Gemma(schema).value(schema, 0)


@dataclass(frozen=True)
class _Gemma:
    root: Mapping[str, Any]

    def value(self, schema: Any, depth: int) -> Format:
        if depth > _MAX_NESTING:
            raise RequestError("the schema is nested too deeply for this format of calls")
        given = schema if isinstance(schema, Mapping) else {}
        if isinstance(given.get("$ref"), str):
            return self.value(target(given["$ref"], self.root), depth + 1)
        for key in ("anyOf", "oneOf"):
            if isinstance(given.get(key), list):
                return either(*(self.value(part, depth + 1) for part in given[key]))
        values = [given["const"]] if "const" in given else given.get("enum")
        if isinstance(values, list):
            return either(*(text(_gemma(value)) for value in values))
        types = allowed_types(given, self.root)
        kept = [kind for kind in _TYPES if kind in types]
        if "number" in kept and "integer" in kept:
            kept.remove("integer")
        if len(kept) == len(_TYPES) - 1 and given.keys() <= _NOTES:
            return {"type": "grammar", "grammar": _GEMMA_ANYTHING}
        self._check(given, kept)
        return either(*(self._typed(kind, given, depth + 1) for kind in kept))

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> Format:
        if kind == "string":
            free = {"type": "any_text", "excludes": ["<|", "<tool_call|>"]}
            inner = regex(schema["pattern"]) if "pattern" in schema else free
            return sequence(text(QUOTE), inner, text(QUOTE))
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            item = self.value(schema.get("items"), depth)
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            if max(least, most or 0) > _MAX_ITEMS:
                raise RequestError(f"lists of this format take at most {_MAX_ITEMS} items")
            return sequence(text("["), separated(item, ",", least, most), text("]"))
        numeric = {key: value for key, value in schema.items() if key not in _NOTES}
        return json_schema({"type": kind, **(numeric if kind in ("number", "integer") else {})})

    def _object(self, schema: Mapping[str, Any], depth: int) -> Format:
        def pair(key: str | None, value: Any) -> Format:
            name = _KEY if key is None else text(key)
            return sequence(name, text(":"), self.value(value, depth))

        return sequence(text("{"), _pairs(schema, pair, ","), text("}"))

    def _check(self, schema: Mapping[str, Any], kinds: list[str]) -> None:
        numeric = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
        known = _NOTES.union(*(_OF_TYPE.get(kind, numeric) for kind in kinds))
        for key in schema:
            if key not in known:
                raise RequestError(f"{shown(key)} has no grammar in this format of calls")


def _gemma(value: Any) -> str:
    """A value in Gemma's notation."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def _pairs(
    schema: Mapping[str, Any],
    pair: Callable[[str | None, Any], Format],
    comma: str,
) -> Format:
    """The properties of an object in their order, of which only the required ones must be there.

    Args:
        pair: makes a property of its name and schema; None: any name.
    """
    properties = schema.get("properties") or {}
    if not properties:
        more = schema.get("additionalProperties")
        if more is False:
            return text("")
        return separated(pair(None, {} if more in (None, True) else more), comma, 0, None)
    required = set(schema.get("required") or ())
    names = list(properties)
    made = {name: pair(name, properties[name]) for name in names}

    later = text("")  # after another property
    first = text("")  # before any
    for name in reversed(names):
        with_comma, alone = sequence(text(comma), made[name], later), sequence(made[name], later)
        if name in required:
            first, later = alone, with_comma
        else:
            first = either(alone, first)
            later = sequence(optional(sequence(text(comma), made[name])), later)
    return first
