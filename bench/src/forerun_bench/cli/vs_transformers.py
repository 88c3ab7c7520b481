"""`forerun bench vs-transformers`: the bundled pair against `transformers.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forerun import LLM
from forerun.cli.counts import check_counts
from forerun.cli.demo import SMALL, demo_prompts
from forerun.cli.output import AsJson, print_json
from forerun.cli.settings import bundled_algorithm
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment, made_with
from forerun.evals.timing import median
from forerun.platform.device import DTYPES, resolve_device
from forerun_bench.vs_transformers import Row, compare_engines, reference


def vs_transformers_command(
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 128,
    repetitions: Annotated[int, typer.Option(help="Timed runs of each prompt, each engine")] = 5,
    algorithm: Annotated[
        str | None,
        typer.Option(help="Speculative algorithm; default: the first with a bundled draft"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N")] = "auto",
    as_json: AsJson = False,
) -> None:
    """The demo's prompts: transformers, its prompt lookup, plain decoding and speculation."""
    check_counts(repetitions=repetitions, max_new_tokens=max_new_tokens)
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype must be float32 or bfloat16, got {dtype!r}.")
    name = (algorithm or bundled_algorithm()).upper()
    where = resolve_device(device)
    common: dict[str, Any] = {**SMALL, "dtype": dtype, "device": str(where)}
    with ExitStack() as stack:
        plain = stack.enter_context(LLM(**common))
        spec = stack.enter_context(LLM(**common, speculative_algorithm=name))
        model = reference(DTYPES[dtype], where)
        prompts = demo_prompts(plain)
        rows = compare_engines(plain, spec, model, where, prompts, max_new_tokens, repetitions)
        made = environment(spec)
    if as_json:
        settings = {
            **{"max_new_tokens": max_new_tokens, "repetitions": repetitions},
            **{"algorithm": name, "dtype": dtype, "device": str(where)},
        }
        print_json({**report(rows), "settings": settings, "environment": made})
        return
    console = Console()
    console.print(table(rows))
    console.print(made_with(made), style="dim", soft_wrap=True)


def report(rows: Sequence[Row]) -> dict[str, Any]:
    first, *_, plain, spec = rows
    return {
        "engines": [
            {
                "name": row.name,
                "tok_s": median(row.tok_s),
                "tok_s_per_prompt": list(row.tok_s),
                "ratio_to_transformers": row.ratio(first),
                "prompts_identical_to_transformers": row.identical,
            }
            for row in rows
        ],
        "plain_over_transformers": plain.ratio(first),
        "spec_over_transformers": spec.ratio(first),
        "spec_over_plain": spec.ratio(plain),
        "prompts": len(first.tok_s),
    }


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    prompts = len(first.tok_s)
    out = Table(title=f"Batch size 1, whole requests, medians over {prompts} prompts")
    out.add_column("engine")
    for name in ("tok/s", "x transformers", "same ids"):
        out.add_column(name, justify="right")
    for row in rows:
        figures = (f"{median(row.tok_s):.0f}", f"{row.ratio(first):.2f}")
        out.add_row(row.name, *figures, f"{row.identical} of {prompts}")
    return out
