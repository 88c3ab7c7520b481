"""Which algorithm serves a draft in speculators' format, by its `speculators_model_type`."""

from __future__ import annotations

from pathlib import Path

from forerun.config.json_files import read_json
from forerun.core.errors import ConfigError, nearest, shown
from forerun.models.eagle3_config import KINDS
from forerun.models.heads.registry import SPECULATORS

TYPE = "speculators_model_type"
SERVED_BY = dict.fromkeys(SPECULATORS, "DFLASH") | dict.fromkeys(KINDS, "EAGLE3")


def refuse_speculators(folder: Path) -> None:
    """Raises ConfigError where a draft that should be a whole model, or its layers, is another."""
    path = folder / "config.json"
    kind = read_json(path).get(TYPE)
    if kind is None:
        return
    if kind in list(SERVED_BY):
        raise ConfigError(
            f"{path} is a speculators {shown(kind)} draft; set speculative_algorithm"
            f" {SERVED_BY[kind]}, which serves it."
        )
    raise ConfigError(
        f"{path}: {TYPE} {shown(kind)} is not known.{nearest(str(kind), SERVED_BY)} Known:"
        f" {', '.join(SERVED_BY)}."
    )
