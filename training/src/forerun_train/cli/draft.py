"""The commands that train: `forerun train KIND`, whose flags are the fields of `TrainOptions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

from forerun.cli.flags import Flag, Values, value_type, with_flags
from forerun.cli.output import dim
from forerun_train.trainer.options import PRESETS, TrainOptions

Preset = Annotated[str | None, typer.Option(help=f"Settings to begin with: {', '.join(PRESETS)}")]


def option_flags() -> list[Flag]:
    """A flag for each field, but for the kind. Not given, the preset or the default decides."""
    hints = get_type_hints(TrainOptions)
    flags = []
    for each in fields(TrainOptions):
        if each.name == "kind":
            continue
        kind = value_type(hints[each.name])
        text = each.metadata["help"]
        if each.name == "target":
            text += " (default: the bundled one)"
        if each.default not in (MISSING, None, False) and each.default != ():
            text += f" (default: {_shown(each.default)})"
        default = False if each.default is False else None
        flags.append(Flag(each.name, kind, default, text, "Training", _parse(kind)))
    return flags


def _parse(kind: Any) -> Callable[[Any], Any] | None:
    """Lists come from typer as lists; fields are tuples."""
    return tuple if kind not in (bool, int, float, str) else None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def command(kind: str) -> Callable[..., None]:
    """The command that trains drafts of a kind."""

    @with_flags(options=option_flags)
    def train(preset: Preset = None, *, options: Values) -> None:
        if "target" not in options:
            from forerun.llm.bundled import bundled

            options["target"] = str(bundled("target"))
        found = TrainOptions.of(preset, {"kind": kind, **options})
        from forerun_train.trainer.run import run  # torch, after the checks above

        dim(f"The draft is in {run(found)}")

    return train
