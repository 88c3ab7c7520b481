"""The command `forerun train evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.counts import check_counts
from forerun.cli.demo import SMALL
from forerun.cli.flags import Values, engine_flags_without, with_flags
from forerun.cli.output import AsJson, fail_if_aborted, print_json, progress_bar
from forerun.cli.settings import with_speculation, without_speculation
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment, made_with
from forerun.evals.prompts import need
from forerun_train.evaluate import (
    Dataset,
    Sampling,
    Score,
    accepted,
    algorithm_of,
    compared,
    confidences,
    open_dataset,
)
from forerun_train.prompts import TOPICS

TAKEN = ("model_path", "speculative_draft_model_path")
DATASETS = "dialogue,code,maths,summary"


@with_flags(engine=engine_flags_without(*TAKEN))
def evaluate_command(
    target: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file or org/name (default: the bundled)")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Folder of the draft")] = None,
    data: Annotated[
        str,
        typer.Option(
            help=f"Datasets: JSONL files, held-out topics ({', '.join(TOPICS)}), word-problems,"
            " python; separated by commas"
        ),
    ] = DATASETS,
    num_prompts: Annotated[int, typer.Option(help="Prompts of each dataset")] = 16,
    temperatures: Annotated[str, typer.Option(help="Separated by commas; 0: greedy")] = "0",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 256,
    repetitions: Annotated[int, typer.Option(help="Timed runs of each prompt, both ways")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of held-out prompts and of sampling")] = 0,
    accept_only: Annotated[
        bool, typer.Option("--accept-only", help="No speeds: batches, with the draft alone")
    ] = False,
    *,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Accept length of a draft by position and dataset, and how much faster it serves."""
    check_counts(num_prompts=num_prompts, repetitions=repetitions, max_new_tokens=max_new_tokens)
    sampling = Sampling(_numbers(temperatures), max_new_tokens, seed, repetitions)
    for temperature in sampling.temperatures:
        sampling.params(temperature)  # refuses what is out of range before anything is loaded
    settings = _settings(target, draft, engine, accept_only)
    names = [name.strip() for name in data.split(",") if name.strip()]
    if not names:
        raise ConfigError("--data names no dataset.")

    def datasets(llm: Any) -> list[Dataset]:
        tokenizer = need(llm.tokenizer)
        return [open_dataset(name, tokenizer, num_prompts, seed) for name in names]

    _run(datasets, sampling, settings, accept_only, as_json)


def _settings(
    target: str | None, draft: str | None, engine: Values, accept_only: bool
) -> dict[str, Any]:
    """Of the engine with the draft. Accept length is that of the full width in every step."""
    settings: dict[str, Any] = {"speculative_adaptive": False, **engine}
    if not accept_only:
        settings = {**SMALL, **settings}
    if target is not None:
        settings["model_path"] = target
    if draft is not None:
        settings["speculative_draft_model_path"] = draft
        settings.setdefault("speculative_algorithm", algorithm_of(draft))
    settings = with_speculation(settings)
    if "speculative_algorithm" not in settings:
        raise ConfigError(
            "give --draft FOLDER, or --speculative-algorithm for one without a draft."
        )
    return settings


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        numbers = ()
    if not numbers:
        raise ConfigError(f"--temperatures must be numbers, '0,1', got {text!r}.")
    return numbers


def _run(
    open_datasets: Any,
    sampling: Sampling,
    settings: dict[str, Any],
    accept_only: bool,
    as_json: bool,
) -> None:
    from forerun.llm import LLM  # slow import, after the checks above

    with ExitStack() as stack:
        spec = stack.enter_context(LLM(**settings))
        datasets = open_datasets(spec)
        total = sum(len(each.prompts) for each in datasets) * len(sampling.temperatures)
        progress = stack.enter_context(progress_bar(as_json))
        bar = progress.add_task("evaluating", total=total)
        if accept_only:
            scores = accepted(spec, datasets, sampling, lambda: progress.advance(bar))
        else:
            plain = stack.enter_context(LLM(**without_speculation(settings)))
            scores = compared(plain, spec, datasets, sampling, lambda: progress.advance(bar))
        found, where = confidences(spec), environment(spec)
    if as_json:
        print_json(
            {
                "scores": [each.as_dict() for each in scores],
                "confidence": found or None,
                "settings": settings,
                "environment": where,
            }
        )
    else:
        show(scores, found, where, Console())
    fail_if_aborted(output for each in scores for output in each.outputs)


def show(
    scores: list[Score], found: Mapping[str, Any], where: Mapping[str, Any], console: Console
) -> None:
    """A table of scores, one of acceptance by position, and one of confidences for each mode."""
    console.print(scores_table(scores))
    console.print(positions_table(scores))
    for mode, reliability in found.items():
        error, after = (
            reliability[f"expected_calibration_error{end}"] for end in ("", "_calibrated")
        )
        console.print(f"confidences, {mode}: ECE {error:.1%}, calibrated {after:.1%}")
        console.print(reliability_table(reliability))
    console.print(Text(made_with(dict(where)), style="dim"), soft_wrap=True)


def scores_table(scores: list[Score]) -> Table:
    """A row for each dataset and temperature, then the mean of each temperature."""
    timed = any(each.comparison is not None for each in scores)
    table = Table()
    table.add_column("dataset", overflow="fold", min_width=13)
    for name in ("T", "prompts", "accept\nlength"):
        table.add_column(name, justify="right")
    if timed:
        for name in ("plain\ntok/s", "draft\ntok/s", "speed-up", "equal"):
            table.add_column(name, justify="right")
    for score in scores:
        table.add_row(*_row(score, timed))
    for temperature in dict.fromkeys(each.temperature for each in scores):
        own = [s.acceptance.accept_length for s in scores if s.temperature == temperature]
        lengths = [length for length in own if length is not None]
        if len(lengths) > 1:
            mean = f"{sum(lengths) / len(lengths):.2f}"
            table.add_row("mean", f"{temperature:g}", "", mean, style="bold")
    return table


def _row(score: Score, timed: bool) -> list[str]:
    length = score.acceptance.accept_length
    cells = [
        score.dataset.name,
        f"{score.temperature:g}",
        str(len(score.dataset.prompts)),
        "-" if length is None else f"{length:.2f}",
    ]
    if timed and score.comparison is not None:
        result = score.comparison
        cells += [
            f"{result.plain_tok_s:.1f}",
            f"{result.spec_tok_s:.1f}",
            f"{result.speedup:.2f}x",
            f"{sum(p.identical for p in result.prompts)}",
        ]
    return cells


def positions_table(scores: list[Score]) -> Table:
    """The share of steps that accepted draft 1, draft 2 and so on, in percent."""
    table = Table()
    table.add_column("dataset", overflow="fold", min_width=13)
    table.add_column("T", justify="right")
    table.add_column("% of steps that accepted draft 1, 2, ...")
    for score in scores:
        shares = score.acceptance.per_position
        shown = " ".join(f"{100 * share:2.0f}" for share in shares)
        table.add_row(score.dataset.name, f"{score.temperature:g}", shown)
    return table


def reliability_table(found: Mapping[str, Any]) -> Table:
    """How often drafts of each confidence were accepted."""
    table = Table()
    for name in ("drafts", "mean confidence", "accepted"):
        table.add_column(name, justify="right")
    for each in found["bins"]:
        table.add_row(
            str(each["drafts"]), f"{each['mean_confidence']:.1%}", f"{each['accepted']:.1%}"
        )
    return table
