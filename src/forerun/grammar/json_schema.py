"""Refuses JSON schemas whose keywords the grammar compiler would ignore.

An output that follows the grammar would not have to validate then. Keywords that only describe a
value (title, format, examples, ...) are ignored on purpose. `oneOf` is treated as `anyOf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.core.errors import RequestError, shown

_NOT_ENFORCED = (
    "not", "uniqueItems", "contains", "minContains", "maxContains", "if", "then", "else",
    "dependentRequired", "dependentSchemas", "dependencies", "additionalItems", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_ANNOTATIONS = {
    "$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "title", "description",
    "default", "examples", "deprecated", "readOnly", "writeOnly", "format", "discriminator",
    "contentEncoding", "contentMediaType",
}  # fmt: skip
_ALTERNATIVES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # nothing beside them applies
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames")


def check_schema(schema: Any) -> list[str]:
    """The regular expressions of a schema.

    Raises:
        RequestError: a keyword would be ignored.
    """
    patterns = []
    for path, part in _schemas(schema, "#"):
        for problem in _problems(part):
            raise RequestError(f"json_schema at {shown(path)[1:-1]}: {problem}.")
        patterns += [part["pattern"]] if isinstance(part.get("pattern"), str) else []
        if isinstance(part.get("patternProperties"), Mapping):
            patterns += list(part["patternProperties"])
    return patterns


def schemas_of_tag(tag: Any) -> Iterator[Any]:
    """The JSON schemas in a structural tag."""
    if isinstance(tag, Mapping):
        for key, value in tag.items():
            if key == "json_schema" and isinstance(value, Mapping):
                yield value
            else:
                yield from schemas_of_tag(value)
    elif isinstance(tag, list):
        for value in tag:
            yield from schemas_of_tag(value)


def _schemas(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every schema object with its path; at most `MAX_JSON_DEPTH` levels."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for key in _SCHEMAS:
        yield from _schemas(schema.get(key), f"{path}/{key}")
    for key in _LISTS:
        parts = schema.get(key)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            yield from _schemas(part, f"{path}/{key}/{i}")
    for key in _OF_SCHEMAS:
        named = schema.get(key)
        for name, part in named.items() if isinstance(named, Mapping) else ():
            yield from _schemas(part, f"{path}/{key}/{name}")


def _problems(schema: Mapping[str, Any]) -> Iterator[str]:
    for keyword in _NOT_ENFORCED:
        if schema.get(keyword, False) is not False:
            yield f"{keyword} cannot be enforced; remove it"
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        yield f"$ref must be '#' or begin with '#/', got {shown(reference)}"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "allOf with several schemas cannot be enforced; merge them"
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        yield "pattern with minLength or maxLength cannot be enforced; put the length into it"
    if "multipleOf" in schema and schema.get("type") != "integer":
        yield "multipleOf can be enforced for integers only; remove it"
    yield from _beside_alternatives(schema)


def _beside_alternatives(schema: Mapping[str, Any]) -> Iterator[str]:
    """Keywords that would be ignored because another one defines the value."""
    chosen = next((keyword for keyword in _ALTERNATIVES if keyword in schema), None)
    if chosen is None:
        return
    for keyword in schema:
        if keyword == chosen or keyword in _ANNOTATIONS:
            continue
        if keyword == "type" and chosen in ("const", "enum"):
            values = [schema["const"]] if chosen == "const" else schema["enum"]
            if not isinstance(values, list) or all(_is_a(v, schema["type"]) for v in values):
                continue
        yield f"{keyword} beside {chosen} cannot be enforced; remove it or merge them"


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value of an enum has the type, or one of the types, beside it."""
    if isinstance(kind, list):
        return any(_is_a(value, each) for each in kind)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return bool(
        {
            "string": isinstance(value, str),
            "integer": number and float(value).is_integer(),
            "number": number,
            "boolean": isinstance(value, bool),
            "null": value is None,
            "array": isinstance(value, list),
            "object": isinstance(value, dict),
        }.get(kind, True)  # an unknown type: the compiler refuses it
    )
