"""Schemas are refused where the grammar would be weaker than the schema."""

from __future__ import annotations

import re
from typing import Any

import pytest

from forerun.core.errors import RequestError
from forerun.grammar.json_schema import exact_schema, exact_tag, patterns, patterns_of_tag

NUMBER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": NUMBER}, "at #: not cannot be enforced"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": NUMBER}, "contains"),
        ({"if": NUMBER, "then": NUMBER}, "if cannot"),
        ({"properties": {"a": {"not": {}}}}, "at #/properties/a: not"),
        ({"$defs": {"x": {"anyOf": [{}, {"not": {}}]}}}, "#/$defs/x/anyOf/1"),
        ({"type": "object", "patternProperties": {"^a": {"not": {}}}}, "patternProperties/^a"),
        (
            {"type": "array", "items": {"dependentRequired": {"a": ["b"]}}},
            "at #/items: dependentRequired",
        ),
        ({"type": "object", "additionalProperties": {"not": {}}}, "#/additionalProperties: not"),
        ({"type": "number", "multipleOf": 0.5}, "for integers without bounds"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "pattern with minLength"),
        ({"allOf": [NUMBER, {"minimum": 3}]}, "allOf with several"),
        ({"type": "integer", "anyOf": [{"minimum": 3}]}, "type beside anyOf"),
        ({"$ref": "#/$defs/a", "minimum": 1}, "minimum beside $ref"),
        ({"$ref": "http://example.com/x"}, "must be '#' or begin with '#/'"),
        ({"$ref": "#/$defs/x", "$defs": {"x": 3}}, "at #: $ref '#/$defs/x' refers to nothing"),
        ({"items": {"$ref": "#/items"}, "type": "array"}, "at #/items: $ref '#/items' refers to"),
        (
            {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}}},
            "at #/anyOf/0: $ref '#/$defs/b' refers to nothing",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/a~0"}}}, "has an escape; rename"),
        ({"type": "string", "enum": ["a", 1]}, "type beside enum"),
        ({"type": "integer", "const": "a"}, "type beside const"),
        ({"enum": ["abc"], "minLength": 4}, "minLength beside enum"),
        ({"minimum": 3}, "minimum needs a type"),
        ({"properties": {"a": {}}, "minLength": 3}, "minLength needs a type"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "greater than maxLength"),
        ({"type": "string", "minLength": 1.5}, "minLength must be an integer"),
        ({"type": "string", "minLength": 1, "format": "date"}, "format with minLength"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "without bounds"),
        ({"type": "object", "required": ["a"]}, "'a' is required and not among properties"),
        ({"type": "object", "properties": {}, "propertyNames": {}}, "propertyNames with"),
        ({"type": "object", "minProperties": 2}, "minProperties cannot be enforced"),
    ],
    ids=str,
)
def test_refuses_what_cannot_be_enforced(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        exact_schema(schema)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"not": NUMBER, "if": NUMBER}, "required": ["not"]},
        {"type": "string", "enum": ["a", "b"], "description": "x", "default": "a"},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "number", "const": 3},
        {"$ref": "#/$defs/x", "title": "X", "$defs": {"x": NUMBER}},
        {"anyOf": [NUMBER, {"type": "null"}], "title": "maybe", "$defs": {}},
        {"allOf": [NUMBER]},
        {"type": "array", "uniqueItems": False, "minItems": 2},
        {"type": "integer", "multipleOf": 3},
    ],
    ids=str,
)
def test_takes_what_can(schema: Any) -> None:
    assert exact_schema(schema) == schema


def test_lengths_become_patterns() -> None:
    """Beside lengths the compiler would allow control characters in strings."""
    schema = {"properties": {"a": {"type": "string", "minLength": 2, "title": "x"}}}
    inner = exact_schema(schema)["properties"]["a"]
    assert inner.keys() == {"type", "title", "pattern"}
    pattern = inner["pattern"]
    for good in ("ab", "é😀x", "[]", "\u007f{}"):
        assert re.fullmatch(pattern[1:-1], good)
    for bad in ("a", 'a"b', "a\tb", "a\x1bb", "a\\b"):
        assert not re.fullmatch(pattern[1:-1], bad)
    assert schema["properties"]["a"]["minLength"] == 2  # not changed in place


def test_patterns_are_found_wherever_they_are() -> None:
    schema = {
        "properties": {"pattern": {"pattern": "a+"}},
        "patternProperties": {"^x": {"type": "array", "items": {"pattern": "b"}}},
    }
    assert sorted(patterns(schema)) == ["^x", "a+", "b"]


def test_schemas_of_a_structural_tag() -> None:
    content = {"type": "json_schema", "json_schema": NUMBER}
    tag = {"format": {"tags": [{"content": content}, {"content": {"json_schema": {"x": 1}}}]}}
    assert exact_tag(tag) == tag
    tag["format"]["tags"].append({"json_schema": {"type": "string", "pattern": "a"}})
    assert list(patterns_of_tag(exact_tag(tag))) == ["a"]
    tag["format"]["tags"].append({"json_schema": {"not": {}}})
    with pytest.raises(RequestError, match="not cannot"):
        exact_tag(tag)
