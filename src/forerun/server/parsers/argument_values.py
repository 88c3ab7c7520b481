"""Values of arguments that are written as plain text: typed by the function's JSON schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from forerun.server.parsers.json_object import Expect, JsonScanner, Malformed

STRING = "string"
_ALL = frozenset({"null", "boolean", "integer", "number", STRING, "array", "object"})
_RESTRICTIONS = frozenset({"enum", "const", "pattern", "format", "minLength", "maxLength"})
_MAX_REFERENCES = 32
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def allowed_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON's names of the types that a schema allows; all of them where it does not say.

    Args:
        root: the schema of all arguments, which "$ref" refers to.
    """
    return _types(schema, root, _MAX_REFERENCES)


def _types(schema: Any, root: Mapping[str, Any], references: int) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return _ALL
    types = _ALL
    declared = schema.get("type")
    if isinstance(declared, str | list):
        types &= frozenset([declared] if isinstance(declared, str) else map(str, declared))
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            types &= frozenset().union(*map(_types_of, values))
    if references and isinstance(schema.get("$ref"), str):
        types &= _types(target(schema["$ref"], root), root, references - 1)
    for key in ("anyOf", "oneOf"):
        if references and isinstance(schema.get(key), list):
            parts = (_types(part, root, references - 1) for part in schema[key])
            types &= frozenset().union(*parts)
    if references and isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            types &= _types(part, root, references - 1)
    return types


def restricted(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a schema asks of strings; None: nothing."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return None
        if _RESTRICTIONS & schema.keys():
            return schema
        schema = target(schema["$ref"], root) if isinstance(schema.get("$ref"), str) else None
    return None


def fitting(text: str, raw: str, schema: Mapping[str, Any]) -> str:
    """A string as its schema wants it: spaces around it may be part of it, or not.

    Args:
        raw: the text with the line breaks around it.
        schema: as of `restricted`.
    """
    stripped = text.strip()
    if {"pattern", "format"} & schema.keys():
        return stripped
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    for candidate in (text, stripped, raw):
        if isinstance(values, list):
            fits = candidate in values
        else:
            fits = _bound(schema, "minLength", 0) <= len(candidate)
            fits = fits and len(candidate) <= _bound(schema, "maxLength", len(raw))
        if fits:
            return candidate
    return text


def _bound(schema: Mapping[str, Any], name: str, default: int) -> int:
    value = schema.get(name)
    return value if isinstance(value, int) else default


def target(reference: str, root: Mapping[str, Any]) -> Any:
    """What "#/$defs/x" refers to; None: nothing."""
    found: Any = root
    for key in reference.split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key.replace("~1", "/").replace("~0", "~"))
    return found


def property_schema(root: Mapping[str, Any], key: str) -> Any:
    """The schema of the argument `key`; None: anything."""
    properties = root.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return root.get("additionalProperties")


def _types_of(value: Any) -> frozenset[str]:
    """Types that a value belongs to; 2.0 is an integer, too, as in JSON schemas."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case str():
            return frozenset({STRING})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value: the first reading of its text that has one of the types, else a string.

    Read as JSON, as words that mean true, false or null, and as a literal of Python.
    """
    for value, written in _readings(text.strip()):
        if types & _types_of(value) and not isinstance(value, str):
            return written
    return json.dumps(text, ensure_ascii=False)


def _readings(text: str) -> Iterator[tuple[Any, str]]:
    """Values, each with its JSON."""
    with suppress(ValueError, RecursionError):
        yield json.loads(text, parse_constant=_refused), text
    with suppress(ValueError, RecursionError):  # line breaks in strings
        value = json.loads(text, parse_constant=_refused, strict=False)
        yield value, json.dumps(value, ensure_ascii=False)
    word = _WORDS.get(text.lower())
    if word is not None:
        yield json.loads(word), word
    if text[:1] in ("[", "{", "("):
        try:
            value = ast.literal_eval(text)
            plain = list(value) if isinstance(value, tuple) else value
            yield plain, json.dumps(plain, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return


def _refused(name: str) -> Any:
    """
    Raises:
        ValueError: always; `name` is NaN or an infinity, which JSON lacks.
    """
    raise ValueError(name)


def ends_in_string(text: str) -> bool:
    """Whether a text is the beginning of a list or an object in JSON, up to within a string."""
    text = text.lstrip()
    if text[:1] not in ("[", "{"):
        return False
    scanner = JsonScanner()
    try:
        for char in f'{{"":{text}':
            scanner.push(char)
    except Malformed:
        return False
    return scanner.expect is Expect.STRING


def escaped(text: str) -> str:
    """A piece of a JSON string.

    Raises:
        Malformed: it has a lone surrogate.
    """
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise Malformed
    return json.dumps(text, ensure_ascii=False)[1:-1]
