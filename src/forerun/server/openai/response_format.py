"""OpenAI's `response_format`, and `text.format` of responses, as sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.core.errors import RequestError, nearest, shown

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_KEYS = ("name", "description", "schema", "strict")  # `strict` or not: it is enforced


def grammar_of_format(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The grammar parameter of `SamplingParams`, if any.

    Raises:
        RequestError: it is invalid.
    """
    if given is not None and given.get("type") == "json_schema":
        return {"json_schema": _schema("response_format.json_schema", given.get("json_schema"))}
    return _grammar("response_format", given)


def grammar_of_text_format(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Does what `grammar_of_format` does; here name and schema are beside the type."""
    if given is not None and given.get("type") == "json_schema":
        schema = {name: value for name, value in given.items() if name != "type"}
        return {"json_schema": _schema("text.format", schema)}
    return _grammar("text.format", given)


def _grammar(what: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    match given.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"json_object": True}
        case "structural_tag":
            return {"structural_tag": dict(given)}
        case other:
            raise RequestError(
                f"{what}.type must be one of {', '.join(_TYPES)}, got {shown(other)}."
            )


def _schema(what: str, given: Any) -> Any:
    if not isinstance(given, Mapping) or not isinstance(given.get("schema"), Mapping):
        raise RequestError(
            f"{what} must be an object with a name and a schema, got {shown(given)}."
        )
    for key in given:
        if key not in _SCHEMA_KEYS:
            raise RequestError(f"{what} has no {shown(key)}.{nearest(key, _SCHEMA_KEYS)}")
    return given["schema"]
