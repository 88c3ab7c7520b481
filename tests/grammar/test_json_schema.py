"""Schemas are refused where the grammar would be weaker than the schema."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.core.errors import RequestError
from forerun.grammar.json_schema import check_schema, schemas_of_tag

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
        ({"patternProperties": {"^a": {"not": {}}}}, "patternProperties"),
        ({"items": {"dependentRequired": {"a": ["b"]}}}, "at #/items: dependentRequired"),
        ({"additionalProperties": {"not": {}}}, "additionalProperties"),
        ({"type": "number", "multipleOf": 0.5}, "integers only"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "pattern with minLength"),
        ({"allOf": [NUMBER, {"minimum": 3}]}, "allOf with several"),
        ({"type": "integer", "anyOf": [{"minimum": 3}]}, "type beside anyOf"),
        ({"$ref": "#/$defs/a", "minimum": 1}, "minimum beside $ref"),
        ({"$ref": "http://example.com/x"}, "must be '#' or begin with '#/'"),
        ({"type": "string", "enum": ["a", 1]}, "type beside enum"),
        ({"type": "integer", "const": "a"}, "type beside const"),
        ({"enum": ["abc"], "minLength": 4}, "minLength beside enum"),
    ],
    ids=str,
)
def test_refuses_what_cannot_be_enforced(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_schema(schema)
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
    check_schema(schema)


def test_patterns_are_found_wherever_they_are() -> None:
    schema = {
        "properties": {"pattern": {"pattern": "a+"}},
        "patternProperties": {"^x": {"items": {"pattern": "b"}}},
    }
    assert sorted(check_schema(schema)) == ["^x", "a+", "b"]


def test_schemas_of_a_structural_tag() -> None:
    content = {"type": "json_schema", "json_schema": NUMBER}
    tag = {"format": {"tags": [{"content": content}, {"content": {"json_schema": {"x": 1}}}]}}
    assert list(schemas_of_tag(tag)) == [NUMBER, {"x": 1}]
