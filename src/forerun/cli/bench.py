"""`forerun bench`: the benchmarks, each in a file of its own."""

from __future__ import annotations

import typer

from forerun.cli.bench_adaptive import adaptive_command
from forerun.cli.bench_algorithms import algorithms_command
from forerun.cli.bench_inputs import ListCommand
from forerun.cli.bench_one_batch import one_batch_command
from forerun.cli.bench_overlap import overlap_command

app = typer.Typer(no_args_is_help=True)
app.command("one-batch", cls=ListCommand)(one_batch_command)
app.command("algorithms", cls=ListCommand)(algorithms_command)
app.command("adaptive", cls=ListCommand)(adaptive_command)
app.command("overlap", cls=ListCommand)(overlap_command)
