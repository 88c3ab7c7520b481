"""Which algorithm serves a draft in speculators' format, by its `speculators_model_type`."""

from __future__ import annotations

from pathlib import Path

from forerun.config.json_files import read_json
from forerun.core.errors import ConfigError, nearest, shown
from forerun.models.heads.registry import SERVED_BY

TYPE = "speculators_model_type"


def refuse_speculators(folder: Path) -> None:
    """Raises ConfigError where a draft that should be a whole model, or its layers, is another."""
    path = folder / "config.json"
    kind = read_json(path).get(TYPE)
    if kind is None:
        return
    algorithm = SERVED_BY.get(str(kind).lower())
    if algorithm is not None:
        raise ConfigError(
            f"{path} is a speculators {shown(kind)} draft; set speculative_algorithm"
            f" {algorithm}, which serves it."
        )
    raise ConfigError(
        f"{path}: {TYPE} {shown(kind)} is not known.{nearest(str(kind), SERVED_BY)} Known:"
        f" {', '.join(SERVED_BY)}."
    )
