"""`forerun bench`: one file per benchmark."""

from __future__ import annotations

import typer

from forerun.bench.cli.adaptive import adaptive_command
from forerun.bench.cli.algorithms import algorithms_command
from forerun.bench.cli.first_token import first_token_command
from forerun.bench.cli.inputs import ListCommand
from forerun.bench.cli.one_batch import one_batch_command
from forerun.bench.cli.overlap import overlap_command
from forerun.bench.cli.vs_transformers import vs_transformers_command

app = typer.Typer(no_args_is_help=True)
app.command("one-batch", cls=ListCommand)(one_batch_command)
app.command("algorithms", cls=ListCommand)(algorithms_command)
app.command("adaptive", cls=ListCommand)(adaptive_command)
app.command("vs-transformers")(vs_transformers_command)
app.command("overlap", cls=ListCommand)(overlap_command)
app.command("first-token", cls=ListCommand)(first_token_command)
