"""Formats of xgrammar's structural tags."""

from __future__ import annotations

from typing import Any

Format = dict[str, Any]


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def sequence(*elements: Format) -> Format:
    """Makes a sequence without empty texts."""
    kept = [each for each in elements if each != text("")]
    if not kept:
        return text("")
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def either(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def repeated(content: Format, least: int, most: int = -1) -> Format:
    """`most`: -1: any number."""
    return {"type": "repeat", "min": least, "max": most, "content": content}


def separated(item: Format, separator: str, least: int, most: int | None) -> Format:
    """Items with a separator between them; `most`: None: any number."""
    if most == 0:
        return text("")
    others = repeated(
        sequence(text(separator), item), max(least - 1, 0), -1 if most is None else most - 1
    )
    several = sequence(item, others)
    return several if least else optional(several)


def json_schema(schema: Any, style: str = "json") -> Format:
    """JSON, or elements, that validate."""
    return {
        "type": "json_schema",
        "json_schema": schema,
        "style": style,
        "max_whitespace_cnt": 1,  # small models write spaces without end
    }
