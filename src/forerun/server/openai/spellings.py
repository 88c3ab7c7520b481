"""vLLM's names of what Forerun names as SGLang does: one table, applied before a body is checked.

A name is translated where the field of the same meaning is not set; both together are refused,
unless their values are equal, as clients send them that serve old and new versions of vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from forerun.core.errors import shown
from forerun.core.grammar import KINDS
from forerun.server.http.strict_model import invalid

log = logging.getLogger("forerun")
MAX_CHOICES = 1024


class Spelling(NamedTuple):
    field: str  # of ours
    convert: Callable[[Any], Any] = lambda value: value


def ebnf_of_choices(choices: Any) -> str:
    """A grammar of these texts and no others."""
    if not isinstance(choices, list) or not choices or len(choices) > MAX_CHOICES:
        raise invalid(
            f"A choice must be a list of 1 to {MAX_CHOICES} strings, got {shown(choices)}."
        )
    for choice in choices:
        if not isinstance(choice, str):
            raise invalid(f"A choice must be a list of strings, got {shown(choice)} in it.")
    texts = dict.fromkeys(choices)
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, text))}"' for text in texts)


def _escaped(character: str) -> str:
    """ASCII other than letters and digits as a number; in a grammar it may mean something."""
    if character.isalnum() or ord(character) > 0x7E:
        return character
    return f"\\u{ord(character):04x}"


def _object_schema(asked: Any) -> Any:
    if not isinstance(asked, bool):
        raise invalid(f"json_object must be true or false, got {shown(asked)}.")
    return {"type": "object"} if asked else None


# Of `structured_outputs`; with guided_ before them, names of their own.
_OUTPUTS = {
    "json": Spelling("json_schema"),
    "regex": Spelling("regex"),
    "choice": Spelling("ebnf", ebnf_of_choices),
    "grammar": Spelling("ebnf"),
    "json_object": Spelling("json_schema", _object_schema),
    "structural_tag": Spelling("structural_tag"),
}
SPELLINGS = {f"guided_{name}": spelling for name, spelling in _OUTPUTS.items()}
NESTED = "structured_outputs"
IGNORED = ("guided_decoding_backend", "guided_whitespace_pattern")
IGNORED_WITHIN = ("whitespace_pattern",)  # of `structured_outputs`


def respelled(body: Any) -> Any:
    """The body with Forerun's names.

    Raises:
        PydanticCustomError: two values are given under two names, there are several grammars, or
            a value is invalid.
    """
    if not isinstance(body, dict):
        return body
    kept = {name: value for name, value in body.items() if name not in _NAMES}
    given = [(name, SPELLINGS[name], body[name]) for name in SPELLINGS if name in body]
    given += _nested(body.get(NESTED))
    origin: dict[str, str] = {}
    for name, (field, convert), value in given:
        converted = None if value is None else convert(value)
        if converted is None:
            continue
        if kept.get(field) not in (None, converted):
            raise invalid(f"{name} and {origin.get(field, field)} are set; give one.")
        kept[field], origin[field] = converted, name
    grammars = [origin.get(kind, kind) for kind in KINDS if kept.get(kind) is not None]
    if origin and len(grammars) > 1:
        raise invalid(f"{' and '.join(grammars)} are set; an output follows one grammar only.")
    for name in _ignored(body):
        log.info("%s is ignored: there is one grammar compiler.", name)
    return kept


def _ignored(body: Mapping[str, Any]) -> list[str]:
    nested = body.get(NESTED) or {}
    return [name for name in IGNORED if body.get(name) is not None] + [
        f"{NESTED}.{name}" for name in IGNORED_WITHIN if nested.get(name) is not None
    ]


def _nested(given: Any) -> list[tuple[str, Spelling, Any]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise invalid(f"{NESTED} must be an object, got {shown(given)}.")
    for key, value in given.items():
        if key not in (*_OUTPUTS, *IGNORED_WITHIN) and value not in (None, False):
            raise invalid(f"{NESTED} has no {shown(key)}; known are {', '.join(_OUTPUTS)}.")
    return [(f"{NESTED}.{key}", _OUTPUTS[key], given[key]) for key in _OUTPUTS if key in given]


_NAMES = frozenset((*SPELLINGS, NESTED, *IGNORED))
