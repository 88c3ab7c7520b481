"""The command `forerun train speed`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.flags import Values, with_flags
from forerun.cli.output import AsJson, print_json
from forerun.core.errors import ConfigError
from forerun_train.cli.draft import Preset, option_flags
from forerun_train.trainer.options import KINDS, TrainOptions

NOT_USED = ("data", "output", "resume", "target")
DEFAULT_TARGET = "qwen3-8b"


@with_flags(options=lambda: [flag for flag in option_flags() if flag.name not in NOT_USED])
def speed_command(
    kind: Annotated[str, typer.Argument(help=f"Draft: {', '.join(KINDS)}")] = "dflash",
    preset: Preset = None,
    target: Annotated[
        str, typer.Option(help="Folder with a config.json, or a known model as in forerun plan")
    ] = DEFAULT_TARGET,
    document: Annotated[int, typer.Option(help="Tokens of a packed document")] = 1024,
    runs: Annotated[int, typer.Option(help="Timed runs of each part")] = 5,
    *,
    as_json: AsJson = False,
    options: Values,
) -> None:
    """Seconds of a training step and of its parts alone, with random weights and texts."""
    for name, value, least in (("--document", document, 2), ("--runs", runs, 1)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}.")
    given = {"kind": kind, "target": target, "data": "", "output": "", **options}
    chosen = TrainOptions.of(preset, given)
    from forerun_train.speed import measure  # torch, after the checks above

    found = measure(chosen, document, runs).as_dict()
    if as_json:
        print_json({**found, "settings": chosen.settings()})
        return
    table = Table("", "")
    for name, figure in found.items():
        table.add_row(name.replace("_", " "), "-" if figure is None else f"{figure:.4g}")
    Console().print(table)
