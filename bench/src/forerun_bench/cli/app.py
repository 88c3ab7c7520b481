"""`forerun bench`: one file per benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import typer
from typer.core import TyperCommand

from forerun_bench.cli.options import ListCommand, ServingCommand


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark's command lives ("module:function"), and its class."""

    target: str
    cls: type[TyperCommand] = TyperCommand


BENCHMARKS = {
    "one-batch": Benchmark("forerun_bench.cli.one_batch:one_batch_command", ListCommand),
    "http": Benchmark("forerun_bench.cli.http:http_command", ListCommand),
    "serving": Benchmark("forerun_bench.cli.serving:serving_command", ServingCommand),
    "algorithms": Benchmark("forerun_bench.cli.algorithms:algorithms_command", ListCommand),
    "heads": Benchmark("forerun_bench.cli.heads:heads_command", ListCommand),
    "adaptive": Benchmark("forerun_bench.cli.adaptive:adaptive_command", ListCommand),
    "widths": Benchmark("forerun_bench.cli.widths:widths_command", ListCommand),
    "vs-transformers": Benchmark("forerun_bench.cli.vs_transformers:vs_transformers_command"),
    "overlap": Benchmark("forerun_bench.cli.overlap:overlap_command", ListCommand),
    "first-token": Benchmark("forerun_bench.cli.first_token:first_token_command", ListCommand),
    "long-prompt": Benchmark("forerun_bench.cli.long_prompt:long_prompt_command", ListCommand),
}


def build(chosen: str | None = None) -> typer.Typer:
    """With the benchmark `chosen` alone, or with all: most of them import torch."""
    app = typer.Typer()
    app.callback()(lambda: None)  # with one command too it is a group
    for name in [chosen] if chosen in BENCHMARKS else BENCHMARKS:
        module, _, attribute = BENCHMARKS[name].target.partition(":")
        function = vars(import_module(module))[attribute]
        app.command(name, cls=BENCHMARKS[name].cls)(function)
    return app
