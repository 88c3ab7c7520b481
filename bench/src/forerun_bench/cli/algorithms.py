"""`forerun bench algorithms`: all algorithms that run on the bundled pair, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.counts import check_counts
from forerun.cli.demo import SMALL
from forerun.cli.flags import Values, engine_flags, with_flags
from forerun.cli.output import AsJson, print_json, progress_bar
from forerun.cli.settings import with_algorithm, without_speculation
from forerun.cli.tables import wide_console
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment, made_with
from forerun.evals.prompts import chat_encoder, encoder, python_prompts, word_prompts
from forerun.speculative.registry import algorithm_names, get_algorithm
from forerun_bench.algorithms import Row, compare_algorithms

PLAIN = "NONE"


@with_flags(engine=engine_flags)
def algorithms_command(
    algorithms: Annotated[list[str], typer.Option(help="One or more; default: all installed")] = [],  # noqa: B006
    num_examples: Annotated[int, typer.Option(help="Prompts of each skill")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 128,
    *,
    repetitions: Annotated[int, typer.Option(help="Timed runs of each prompt and algorithm")] = 3,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Accept length, step time and speed-up of every algorithm, one request at a time."""
    check_counts(repetitions=repetitions, num_examples=num_examples, max_new_tokens=max_new_tokens)
    if "speculative_algorithm" in engine:
        raise ConfigError("Name algorithms with --algorithms, one or more.")
    names = chosen(algorithms)
    settings = {**SMALL, "dtype": "float32", **engine}
    kept = {option for name in names for option in with_algorithm(settings, name)}
    if names and (unused := sorted(settings.keys() - kept)):
        raise ConfigError(f"{unused[0]} is no option of {', '.join(names)}; drop it.")
    with ExitStack() as stack:
        plain = stack.enter_context(LLM(**without_speculation(settings)))
        prompts = word_prompts(chat_encoder(plain.tokenizer), num_examples)
        prompts += python_prompts(encoder(plain.tokenizer), num_examples)
        bar = stack.enter_context(progress_bar(as_json))
        task = bar.add_task("loading", total=len(names) + len(prompts))
        engines: dict[str, LLM] = {}
        refused: dict[str, str] = {}
        for name in names:
            try:
                made = LLM(**with_algorithm(settings, name))
                engines[name] = stack.enter_context(made)
            except Exception as error:  # noqa: BLE001  a plugin's code; shown below the table
                known = isinstance(error, ConfigError)
                refused[name] = str(error) if known else f"{type(error).__name__}: {error}"
            bar.advance(task)
        bar.update(task, description="measuring")
        rows = compare_algorithms(
            *(plain, engines, prompts, max_new_tokens, repetitions),
            on_prompt=lambda: bar.advance(task),
        )
        where = environment(plain)
    rows += [Row(name, reason=reason) for name, reason in refused.items()]
    if as_json:
        found = {"algorithms": [row.as_dict() for row in rows], "repetitions": repetitions}
        print_json({**found, "settings": settings, "environment": where})
    else:
        console = wide_console()
        console.print(table(rows))
        for row in rows:
            if row.reason is not None:
                console.print(f"{row.algorithm}: {row.reason}", markup=False, soft_wrap=True)
        console.print(made_with(where), style="dim", soft_wrap=True)
    if any(row.identical is False for row in rows):
        raise typer.Exit(1)


def chosen(names: Sequence[str]) -> list[str]:
    """The given names, or all; without plain decoding, which always runs.

    Raises:
        ConfigError: an unknown name.
    """
    asked = [name.upper() for name in names] or algorithm_names()
    for name in names:
        get_algorithm(name)
    return [name for name in dict.fromkeys(asked) if name != PLAIN]


def table(rows: Sequence[Row]) -> Table:
    skills = list(rows[0].accept_lengths)
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    out.add_column("algorithm", no_wrap=True)
    heads = [f"accept length\n{skill}" for skill in skills]
    for name in (*heads, "step\nms", "speed-up", "speed-up\nadaptive"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("same\ntext", no_wrap=True)
    for row in rows:
        lengths = [_figure(row.accept_lengths.get(skill)) for skill in skills]
        ms = None if row.step_seconds is None else 1000 * row.step_seconds
        speeds = [_figure(row.speedup), _figure(row.adaptive_speedup)]
        same = "refused" if row.reason is not None else "yes" if row.identical else "no"
        out.add_row(row.algorithm, *lengths, _figure(ms), *speeds, same)
    return out


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
