"""Makes JSON schemas exact: an output that follows the grammar must validate.

The grammar compiler ignores some keywords, and some combinations of others. Schemas that have them
are refused with the place, or rewritten where that is possible. Keywords that only describe a value
(title, examples, ...) are ignored on purpose. `oneOf` is treated as `anyOf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.core.errors import RequestError, shown
from forerun.grammar.counts import MAX_COUNT, split_ebnf, split_regex, times

_NOT_ENFORCED = (
    "not", "uniqueItems", "contains", "minContains", "maxContains", "if", "then", "else",
    "dependentRequired", "dependentSchemas", "dependencies", "additionalItems", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_ANNOTATIONS = {
    "$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "title", "description",
    "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "contentEncoding", "contentMediaType",
}  # fmt: skip
_ALTERNATIVES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # nothing beside them applies
_OBJECT = {
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "unevaluatedProperties",
}  # fmt: skip
_LENGTHS = ("minLength", "maxLength")
_COUNTS = (*_LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TYPED = _OBJECT | {
    *_LENGTHS, *_BOUNDS, "pattern", "multipleOf", "items", "prefixItems", "minItems", "maxItems",
}  # fmt: skip
# What a string of JSON may hold without an escape. A dot would allow invalid UTF-8.
_CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
# In a structural tag: type of a format, key of its text, and what splits the counts in that.
_SPLIT_IN_TAG = (("regex", "pattern", split_regex), ("grammar", "grammar", split_ebnf))
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames")


def exact_schema(schema: Any, path: str = "#", root: Mapping[str, Any] | None = None) -> Any:
    """The schema as the compiler is to get it; at most `MAX_JSON_DEPTH` levels.

    `root`: what references are relative to; none: the schema itself.

    Raises:
        RequestError: a keyword would be ignored, or a reference leads to no schema.
    """
    if not isinstance(schema, Mapping):
        return schema
    root = schema if root is None else root
    for problem in (*_problems(schema), *_problems_of_reference(schema, root)):
        raise RequestError(f"json_schema at {shown(path)[1:-1]}: {problem}.")
    exact = dict(schema)
    for key in exact.keys() & {*_SCHEMAS}:
        exact[key] = exact_schema(exact[key], f"{path}/{key}", root)
    for key in exact.keys() & {*_LISTS}:
        if isinstance(exact[key], list):
            parts = enumerate(exact[key])
            exact[key] = [exact_schema(part, f"{path}/{key}/{i}", root) for i, part in parts]
    for key in exact.keys() & {*_OF_SCHEMAS}:
        if isinstance(exact[key], Mapping):
            exact[key] = {
                name: exact_schema(part, f"{path}/{key}/{name}", root)
                for name, part in exact[key].items()
            }
    return _with_length_pattern(_with_small_counts(exact))


def _with_small_counts(schema: dict[str, Any]) -> dict[str, Any]:
    """Its regular expressions without counts that the compiler gets wrong."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = split_regex(schema["pattern"])
    named = schema.get("patternProperties")
    if isinstance(named, Mapping):
        schema["patternProperties"] = {split_regex(name): part for name, part in named.items()}
    return schema


def _problems_of_reference(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with its reference, and with those that this leads to."""
    met: list[Any] = []
    while "$ref" in schema:
        reference = schema["$ref"]
        if not isinstance(reference, str):
            yield f"$ref must be a text, got {shown(reference)}"
        elif reference in met:
            yield f"$ref {shown(reference)} refers to itself"
        elif reference != "#" and not reference.startswith("#/"):
            yield f"$ref must be '#' or begin with '#/', got {shown(reference)}"
        elif "~" in reference:
            yield f"$ref {shown(reference)} has an escape; rename what it refers to"
        elif not isinstance(found := _at(root, reference), Mapping | bool):
            yield f"$ref {shown(reference)} refers to nothing"
        elif not isinstance(found, bool):
            met.append(reference)
            schema = found
            continue
        return


def _at(root: Mapping[str, Any], reference: str) -> Any:
    """What stands where a reference leads; None: nothing."""
    found: Any = root
    for key in reference.split("/")[1:]:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def patterns(schema: Any) -> Iterator[str]:
    """The regular expressions of a schema, from `exact_schema`."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(schema.get("pattern"), str):
        yield schema["pattern"]
    if isinstance(schema.get("patternProperties"), Mapping):
        yield from schema["patternProperties"]
    inner = [schema.get(key) for key in _SCHEMAS]
    for key in _LISTS:
        inner += schema[key] if isinstance(schema.get(key), list) else []
    for key in _OF_SCHEMAS:
        inner += schema[key].values() if isinstance(schema.get(key), Mapping) else []
    for part in inner:
        yield from patterns(part)


def exact_tag(tag: Any, any_whitespace: bool = True) -> Any:
    """A structural tag with its JSON schemas as the compiler is to get them.

    Args:
        any_whitespace: False: one space, at most, between the tokens of JSON.
    """
    if isinstance(tag, Mapping):
        exact = {
            key: exact_schema(value) if key == "json_schema" else exact_tag(value, any_whitespace)
            for key, value in tag.items()
        }
        for kind, key, split in _SPLIT_IN_TAG:
            if tag.get("type") == kind and isinstance(tag.get(key), str):
                exact[key] = split(tag[key])
        limited = "json_schema" in tag and not any_whitespace
        return {"max_whitespace_cnt": 1, **exact} if limited else exact
    return [exact_tag(value, any_whitespace) for value in tag] if isinstance(tag, list) else tag


def patterns_of_tag(tag: Any) -> Iterator[str]:
    """The regular expressions of the JSON schemas in a structural tag."""
    if isinstance(tag, Mapping):
        for key, value in tag.items():
            yield from patterns(value) if key == "json_schema" else patterns_of_tag(value)
    elif isinstance(tag, list):
        for value in tag:
            yield from patterns_of_tag(value)


def _with_length_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Lengths as a pattern: the compiler would allow control characters beside them."""
    if not schema.keys() & {*_LENGTHS}:
        return schema
    low, high = schema.pop("minLength", 0), schema.pop("maxLength", None)
    return {**schema, "pattern": f"^{times(_CHARACTER, low, high)}$"}


def _problems(schema: Mapping[str, Any]) -> Iterator[str]:
    for keyword in _NOT_ENFORCED:
        if schema.get(keyword, False) is not False:
            yield f"{keyword} cannot be enforced; remove it"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "allOf with several schemas cannot be enforced; merge them"
    yield from _beside_alternatives(schema)
    for key in _COUNTS:
        if type(schema.get(key)) is int and schema[key] > MAX_COUNT:
            yield f"{key} is over {MAX_COUNT}, got {shown(schema[key])}; make it smaller"
    yield from _of_strings(schema)
    yield from _of_objects(schema)
    if "multipleOf" in schema and (schema.get("type") != "integer" or schema.keys() & {*_BOUNDS}):
        yield "multipleOf can be enforced for integers without bounds only; remove it"
    # Without a type, objects are assumed where properties are given.
    untyped = schema.keys() & (_TYPED - (_OBJECT if "properties" in schema else set()))
    if "type" not in schema and untyped:
        yield f"{min(untyped)} needs a type beside it"


def _of_strings(schema: Mapping[str, Any]) -> Iterator[str]:
    lengths = [key for key in _LENGTHS if key in schema]
    for key in lengths:
        if type(schema[key]) is not int or schema[key] < 0:
            yield f"{key} must be an integer >= 0, got {shown(schema[key])}"
    if lengths and schema.get("minLength", 0) > schema.get("maxLength", schema.get("minLength", 0)):
        yield "minLength is greater than maxLength"
    for other in ("pattern", "format"):
        if other in schema and lengths:
            yield f"{other} with {lengths[0]} cannot be enforced; put the length into a pattern"
    if "pattern" in schema and "format" in schema:
        yield "pattern with format cannot be enforced; remove one of them"


def _of_objects(schema: Mapping[str, Any]) -> Iterator[str]:
    declared, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(declared, Mapping) and isinstance(required, list):
        for name in required:
            if name not in declared:
                yield f"{shown(name)} is required and not among properties; declare it there"
    free = "properties" not in schema or schema.get("additionalProperties", False) is not False
    free = free or bool(schema.keys() & {"patternProperties", "unevaluatedProperties"})
    if free and schema.get("minProperties", 0) not in (0, 1):
        yield "minProperties cannot be enforced beside undeclared properties; remove it"
    others = sorted(schema.keys() & (_OBJECT - {"propertyNames", "required"}))
    if "propertyNames" in schema and others:
        yield f"propertyNames with {others[0]} cannot be enforced; remove one of them"


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
