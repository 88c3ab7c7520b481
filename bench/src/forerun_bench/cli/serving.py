"""`forerun bench serving`: a load generator for servers, local or not. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

import forerun
from forerun.cli.flags import Flag, Values, config_flags, with_flags
from forerun.cli.output import AsJson, print_json
from forerun.core.errors import ConfigError
from forerun.evals.commit import commit
from forerun_bench.serving.benchmark import Benchmark, benchmark
from forerun_bench.serving.client import Live
from forerun_bench.serving.config import LoadConfig
from forerun_bench.serving.metrics import CLIENT_LIMIT, PERCENTILES, Run

COLUMNS = 100  # least width of the tables


def load_flags() -> list[Flag]:
    return config_flags(LoadConfig)


@with_flags(load=load_flags)
def serving_command(
    output_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append a line of JSON for every run")
    ] = None,
    output_details: Annotated[
        bool, typer.Option("--output-details", help="With the figures of every request, in JSON")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write the CDFs of the latencies")
    ] = None,
    as_json: AsJson = False,
    *,
    load: Values,
) -> None:
    """TTFT, ITL, throughput and accept length of a server under load. Starts no server."""
    config = LoadConfig(**load)
    for path in (output_file, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"There is no folder {path.absolute().parent} to write {path.name}.")
    with Display(config, as_json) as display:
        done = asyncio.run(benchmark(config, display.show))
    if done.warmup_failure is not None:
        Console(stderr=True).print(
            f"forerun: error: the warm-up request failed: {done.warmup_failure}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(1)
    report = as_dict(config, done, output_details)
    if output_file is not None:
        append(output_file, report)
    if plot is not None:
        save_plot(plot, config, done)
    if as_json:
        print_json(report)
    else:
        print_runs(config, done)
    if done.failed:
        raise typer.Exit(1)


class Display:
    """Progress on standard error, if that is a terminal.

    It is drawn only when `show` is called, twice a second, and not by a thread: drawing delays the
    client.
    """

    def __init__(self, config: LoadConfig, quiet: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=quiet or not console.is_terminal,
        )
        self._total = config.num_prompts
        self._tasks: dict[float, TaskID] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def show(self, rate: float, live: Live, seconds: float) -> None:
        if rate not in self._tasks:
            name = "all at once" if math.isinf(rate) else f"{rate:.3g} requests/s"
            self._tasks[rate] = self._progress.add_task(name, total=self._total, figures="")
        speed = live.tokens / seconds if seconds > 0 else 0.0
        figures = f"{live.in_flight} in flight, {speed:.0f} tok/s"
        if live.failed:
            figures += f", {live.failed} failed"
        self._progress.update(self._tasks[rate], completed=live.done, figures=figures)
        self._progress.refresh()


def title(config: LoadConfig, done: Benchmark) -> str:
    model = config.model or (done.server.model if done.server else None)
    named = Path(model).name if model else config.url
    return f"{named}, {config.dataset_name}, {config.num_prompts} requests"


def as_dict(config: LoadConfig, done: Benchmark, details: bool) -> dict[str, Any]:
    """For `--json`. The API key is left out; infinity is written as "inf"."""
    settings = {key: value for key, value in asdict(config).items() if key != "api_key"}
    if math.isinf(config.request_rate):
        settings["request_rate"] = "inf"
    return {
        "settings": {**settings, "base_url": config.url},
        "server": asdict(done.server) if done.server else None,
        "results": [run.as_dict() | (run.details() if details else {}) for run in done.runs],
        "environment": {
            "forerun": forerun.__version__,
            "commit": commit(),
            "python": platform.python_version(),
            "client": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        },
    }


def append(path: Path, report: dict[str, Any]) -> None:
    """A line for each run, flat, with SGLang's keys; lines that are there stay."""
    with path.open("a", encoding="utf-8") as file:
        for result in report["results"]:
            rest = {key: report[key] for key in ("server", "environment")}
            line = {**report["settings"], **result, **rest}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def save_plot(path: Path, config: LoadConfig, done: Benchmark) -> None:
    from forerun_bench.serving.plot import draw  # matplotlib, which takes long to import
    from forerun_bench.svg import save

    name = title(config, done)
    save(draw(done.runs, name), path, name)


def print_runs(config: LoadConfig, done: Benchmark) -> None:
    console = Console(width=max(COLUMNS, Console().width), highlight=False)
    for number, run in enumerate(done.runs):
        name = run.rate_label
        if config.sweep:
            part = f"{config.sweep[number - 1]:g} % of saturation" if number else "saturation"
            name = f"{part}: {name}"
        console.print(f"\n{title(config, done)}, {name}", style="bold", markup=False)
        console.print(summary(run))
        console.print(latencies(run))
        for remark in remarks(run):
            console.print(remark, style="yellow", markup=False, soft_wrap=True)
    at = commit()
    version = f"forerun {forerun.__version__}{f' (commit {at})' if at else ''}"
    console.print(f"{version}, {config.backend} at {config.url}", style="dim", soft_wrap=True)


def summary(run: Run) -> Table:
    """Counts and rates."""
    figures = run.as_dict()
    out = Table(box=None, show_header=False, padding=(0, 2))
    rows = [
        ("requests", f"{figures['completed']} completed, {figures['failed']} failed"),
        ("duration", f"{figures['duration']:.2f} s"),
        ("in flight", f"{figures['concurrency']:.1f} on average, {run.load.peak} at most"),
        ("requests/s", f"{run.request_throughput:.2f}"),
        ("prompt tokens", _tokens(figures, "input")),
        ("output tokens", _tokens(figures, "output")),
    ]
    if run.good is not None:
        goals = ", ".join(f"{name} {1000 * limit:g} ms" for name, limit in run.goals.items())
        rows.append(("goodput", f"{figures['goodput']:.2f} requests/s within {goals}"))
    if run.acceptance is not None:
        where = {"requests": "of these requests", "counters": "from the server's counters"}
        source = where.get(run.acceptance.source, "the server's average, earlier requests too")
        rows.append(("accept length", f"{run.acceptance.length:.2f} ({source})"))
    for name, value in rows:
        out.add_row(name, value)
    return out


def _tokens(figures: dict[str, Any], which: str) -> str:
    said = f"{figures[f'total_{which}_tokens']}, {figures[f'{which}_throughput']:.1f} tok/s"
    cached = figures["total_cached_tokens"]
    return f"{said}, {cached} from the prefix cache" if which == "input" and cached else said


LABELS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL per token",
    "chunk_itl": "ITL per chunk",
    "e2e": "end to end",
}


def latencies(run: Run) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    out.add_column("ms", no_wrap=True)
    for name in ("mean", *(f"p{p}" for p in PERCENTILES)):
        out.add_column(name, justify="right", no_wrap=True)
    for name, label in LABELS.items():
        stats = run.stats(name)
        values = ["-"] * (1 + len(PERCENTILES))
        if stats is not None:
            values = [_ms(value) for value in (stats.mean, *stats.percentiles.values())]
        out.add_row(label, *values)
    return out


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def remarks(run: Run) -> Sequence[str]:
    """What a reader of the figures must know."""
    out = []
    for kind, count in run.errors.items():
        out.append(f"{count} failed: {kind}")
    if run.first_error is not None:
        out.append(f"The first: {run.first_error}")
    if run.streamed and run.completed and not run.tokens_by_chunk:
        out.append(
            "ITL per token is not known: the server does not say how many tokens a chunk has. Use"
            " --backend sglang, or --extra-request-body '{\"return_token_ids\": true}'."
        )
    if not all(outcome.counted for outcome in run.completed):
        out.append("The server did not count output tokens: every chunk counts as one or its ids.")
    if run.client_delay > CLIENT_LIMIT:
        out.append(
            f"This client was late by {1000 * run.client_delay:.1f} ms (p99): latencies include its"
            " own delays. Use fewer requests per second, or a machine with free cores."
        )
    else:
        out.append(f"The client's own delay: {1000 * run.client_delay:.1f} ms (p99).")
    return out
