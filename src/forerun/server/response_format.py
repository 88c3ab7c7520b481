"""OpenAI's `response_format` as sampling parameters."""

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
    if given is None:
        return {}
    match given.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json_schema": _schema(given.get("json_schema"))}
        case "structural_tag":
            return {"structural_tag": dict(given)}
        case other:
            raise RequestError(
                f"response_format.type must be one of {', '.join(_TYPES)}, got {shown(other)}."
            )


def _schema(given: Any) -> Any:
    if not isinstance(given, Mapping) or not isinstance(given.get("schema"), Mapping):
        raise RequestError(
            "response_format.json_schema must be an object with a name and a schema, got"
            f" {shown(given)}."
        )
    for key in given:
        if key not in _SCHEMA_KEYS:
            raise RequestError(
                f"response_format.json_schema has no {shown(key)}.{nearest(key, _SCHEMA_KEYS)}"
            )
    return given["schema"]
