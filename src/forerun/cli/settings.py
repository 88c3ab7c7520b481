"""Engine settings of commands that compare plain decoding with speculation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.speculative.registry import algorithm_names, all_options, get_algorithm


def bundled_algorithm() -> str:
    """The first algorithm with a bundled draft."""
    return next(name for name in algorithm_names() if get_algorithm(name).bundled_draft)


def with_speculation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The bundled target gets its bundled draft unless an algorithm is given; NONE removes it."""
    out = dict(settings)
    if "model_path" not in out:
        out.setdefault("speculative_algorithm", bundled_algorithm())
    if str(out.get("speculative_algorithm", "")).upper() == "NONE":
        del out["speculative_algorithm"]
    return out


def with_algorithm(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The same engine with this algorithm; options that are not its own are dropped."""
    own = {option.name for option in get_algorithm(name).options}
    others = {option.name for option in all_options()} - own
    kept = {key: value for key, value in settings.items() if key not in others}
    return {**kept, "speculative_algorithm": name}


def without_speculation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same engine, decoding plainly."""
    options = {option.name for option in all_options()}
    return {
        name: value
        for name, value in settings.items()
        if not name.startswith("speculative_") and name not in options
    }
