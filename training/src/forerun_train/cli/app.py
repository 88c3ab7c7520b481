"""`forerun train`: a command per kind of draft, and those that make and use its data."""

from __future__ import annotations

from importlib import import_module

import typer

from forerun_train.trainer.options import KINDS

COMMANDS = {
    "prompts": "forerun_train.cli.prompts:prompts",
    "regenerate": "forerun_train.cli.regenerate:regenerate_command",
    "evaluate": "forerun_train.cli.evaluate:evaluate_command",
    "speed": "forerun_train.cli.speed:speed_command",
}


def build(chosen: str | None = None) -> typer.Typer:
    """With the command `chosen` alone, or with all of them."""
    app = typer.Typer()
    app.callback()(lambda: None)  # with one command too it is a group
    known = (*KINDS, *COMMANDS)
    for name in [chosen] if chosen in known else known:
        if name in COMMANDS:
            module, _, attribute = COMMANDS[name].partition(":")
            app.command(name)(vars(import_module(module))[attribute])
        else:
            from forerun_train.cli.draft import command

            app.command(name, help=f"Train a draft of the kind {name}.")(command(name))
    return app
