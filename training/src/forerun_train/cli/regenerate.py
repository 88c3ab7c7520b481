"""The command `forerun train regenerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.cli.counts import check_counts
from forerun.cli.flags import Values, engine_flags_without, sampling_flags, with_flags
from forerun.cli.output import dim
from forerun.core.errors import ConfigError
from forerun.core.sampling_params import SamplingParams
from forerun_train.regenerate import (
    Answers,
    Counts,
    Prompt,
    Regeneration,
    read_prompts,
    regenerate,
)

ANSWER_TOKENS = 512


@with_flags(
    engine=engine_flags_without("model_path"),
    sampling=lambda: [
        flag for flag in sampling_flags(max_new_tokens=ANSWER_TOKENS) if flag.name != "n"
    ],
)
def regenerate_command(
    data: Annotated[str, typer.Option(help="JSONL file or folder of prompts")],
    output: Annotated[Path, typer.Option(help="JSONL file for the answered conversations")],
    target: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file or org/name (default: the bundled)")
    ] = None,
    in_flight: Annotated[int, typer.Option(help="Conversations that are answered at once")] = 256,
    limit: Annotated[int | None, typer.Option(help="Answer only the first prompts")] = None,
    max_errors: Annotated[int, typer.Option(help="Bad lines that are skipped")] = 0,
    *,
    engine: Values,
    sampling: Values,
) -> None:
    """The target answers prompts. Killed, it goes on where it was with the same command."""
    params = SamplingParams.of({"max_new_tokens": ANSWER_TOKENS, **sampling})
    check_counts(in_flight=in_flight, limit=limit, max_new_tokens=params.max_new_tokens)
    if max_errors < 0:
        raise ConfigError(f"--max-errors must be >= 0, got {max_errors}.")
    prompts, skipped = read_prompts(data, max_errors)
    prompts = prompts[:limit]
    made_with = Regeneration(target or "bundled", params, engine, data)
    answers = Answers(output, made_with)
    if skipped.count:
        dim(str(skipped))
    try:
        if all(prompt.id in answers.done for prompt in prompts):
            dim(f"All {len(prompts)} prompts are answered in {output}.")
            return
        counts = _run(target, engine, params, prompts, answers, in_flight)
    finally:
        answers.close()
    _report(counts, output)


def _run(
    target: str | None,
    engine: Values,
    params: SamplingParams,
    prompts: list[Prompt],
    answers: Answers,
    in_flight: int,
) -> Counts:
    from forerun.llm import LLM  # slow import

    console = Console(stderr=True)
    columns = (
        TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[speed]:.0f} tok/s"),
    )  # fmt: skip
    hidden = not console.is_terminal
    with LLM(target, **engine) as llm, Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task("answering", total=len(prompts), speed=0.0)

        def show(counts: Counts) -> None:
            done = counts.kept + counts.answered + counts.refused
            bar.update(task, completed=done, speed=counts.tok_s)

        return regenerate(llm, prompts, answers, params, in_flight, show)


def _report(counts: Counts, output: Path) -> None:
    parts = [f"{counts.answered} conversations answered"]
    if counts.kept:
        parts.append(f"{counts.kept} were there")
    parts.append(f"{counts.tokens} tokens in {counts.seconds:.1f} s, {counts.tok_s:.0f} tok/s")
    dim(f"{output}: {', '.join(parts)}")
    if counts.refused:
        dim(f"{counts.refused} prompts were refused. The first one: {counts.first_refusal}")
        if not counts.answered:
            raise typer.Exit(1)
