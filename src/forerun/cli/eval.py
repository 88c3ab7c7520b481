"""`forerun eval word-problems|python`: accuracy, accept length, acceptance by draft position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun import LLM, RequestOutput, SamplingParams
from forerun.cli.counts import check_counts
from forerun.cli.demo_view import positions
from forerun.cli.flags import Values, engine_flags_without, with_flags
from forerun.cli.output import AsJson, fail_if_aborted, print_json, progress_bar
from forerun.cli.settings import with_speculation, without_speculation
from forerun.evals.environment import environment, made_with
from forerun.evals.prompts import (
    PYTHON,
    WORDS,
    Prompt,
    chat_encoder,
    check_seed,
    encoder,
    python_prompts,
    word_prompts,
)
from forerun.evals.scoring import EvalResult, check_identical, evaluate, run_all
from forerun.evals.word_problems import TEST_SEED

app = typer.Typer()

NumExamples = Annotated[int, typer.Option(help="Number of prompts")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate at most")]
CheckIdentical = Annotated[
    bool, typer.Option("--check-identical", help="Also decode plainly and compare the tokens")
]


@app.command(WORDS)
@with_flags(engine=engine_flags_without("speculative_adaptive"))
def word_problems(
    num_examples: NumExamples = 200,
    max_new_tokens: MaxNewTokens = 256,
    seed: Annotated[
        int, typer.Option(help="Seed of the problems; one that training did not use")
    ] = (TEST_SEED),
    *,
    identical: CheckIdentical = False,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Accuracy and accept length on grade-school word problems."""
    check_seed(seed)

    def prompts(llm: LLM) -> list[Prompt]:
        return word_prompts(chat_encoder(llm.tokenizer), num_examples, seed)

    _run(prompts, num_examples, max_new_tokens, identical, as_json, engine)


@app.command(PYTHON)
@with_flags(engine=engine_flags_without("speculative_adaptive"))
def python(
    num_examples: NumExamples = 60,
    max_new_tokens: MaxNewTokens = 128,
    *,
    identical: CheckIdentical = False,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Accept length on completions of held-out Python code."""

    def prompts(llm: LLM) -> list[Prompt]:
        return python_prompts(encoder(llm.tokenizer), num_examples)

    _run(prompts, num_examples, max_new_tokens, identical, as_json, engine)


def _run(
    make: Callable[[LLM], list[Prompt]],
    count: int,
    max_new_tokens: int,
    identical: bool,
    as_json: bool,
    engine: Values,
) -> None:
    check_counts(num_examples=count, max_new_tokens=max_new_tokens)
    # Accept length is that of the full width in every step.
    settings = {**with_speculation(engine), "speculative_adaptive": False}
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    with LLM(**settings) as llm:
        prompts = make(llm)
        with progress_bar(as_json) as progress:
            bar = progress.add_task("generating", total=count)
            result, outputs = evaluate(llm, prompts, params, lambda: progress.advance(bar))
        where, stats = environment(llm), llm.stats()
    others: list[RequestOutput] = []
    if identical:
        with LLM(**without_speculation(settings)) as plain, progress_bar(as_json) as progress:
            bar = progress.add_task("plain decoding", total=count)
            others = run_all(plain, prompts, params, lambda: progress.advance(bar))
        result = check_identical(result, outputs, others)
    if as_json:
        found = {**result.as_dict(), "stats": stats}
        print_json({**found, "settings": settings, "environment": where})
    else:
        show(result, where, Console())
    fail_if_aborted([*outputs, *others])
    if result.identical is not None and result.identical < result.examples:
        raise typer.Exit(1)


def show(result: EvalResult, where: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows(result):
        table.add_row(name, value)
    console.print(table)
    if result.acceptance.proposed:
        console.print(Text("Fraction of verify steps that accepted draft k", style="bold"))
        console.print(positions(result.acceptance, console))
    console.print(made_with(where), style="dim", soft_wrap=True)


def rows(result: EvalResult) -> Sequence[tuple[str, str]]:
    """(name, figure), without what does not apply."""
    out = [("eval", result.name), ("examples", str(result.examples))]
    if result.accuracy is not None:
        out.append(("accuracy", f"{result.accuracy:.1%} ({result.correct} right)"))
    whole = result.acceptance
    if whole.proposed:
        out.append(("accept length", f"{whole.accept_length:.2f}"))
        out.append(("accept rate", f"{whole.accept_rate:.1%}"))
    out.append(("output tokens", str(result.tokens)))
    out.append(("tok/s, all requests", f"{result.tok_s:.0f}"))
    if result.identical is not None:
        out.append(("identical to plain", f"{result.identical} of {result.examples}"))
    return out
