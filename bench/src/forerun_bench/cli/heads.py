"""`forerun bench heads`: what a drafting head costs beside a DFLASH draft without one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.flags import Values, engine_flags_without, with_flags
from forerun.cli.output import AsJson, print_json
from forerun.cli.tables import milliseconds, print_table
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment
from forerun_bench.cli.inputs import Preset, check, with_preset, with_room
from forerun_bench.heads import HEADS, PLAIN, HeadStep, compare_steps, write_draft
from forerun_bench.one_batch import Shape


@with_flags(engine=engine_flags_without("speculative_adaptive"))
def heads_command(
    heads: Annotated[
        list[str], typer.Option(help=f"One or more of {', '.join(HEADS)}; {PLAIN}: a control")
    ] = [  # noqa: B006
        *HEADS
    ],
    width: Annotated[list[int], typer.Option(help="Tokens that a step verifies, one or more")] = [  # noqa: B006
        8
    ],
    batch_size: Annotated[list[int], typer.Option(help="One or more")] = [1, 8, 32],  # noqa: B006
    input_len: Annotated[int, typer.Option(help="Prompt tokens")] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens")] = 48,
    *,
    preset: Preset = "qwen3-8b",
    repetitions: Annotated[int, typer.Option(help="Runs of each batch, in turns")] = 3,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Step times of drafting heads, each in turns with a plain DFLASH draft of the same width."""
    unknown = [head for head in heads if head not in (PLAIN, *HEADS)]
    if unknown:
        raise ConfigError(f"Unknown head {unknown[0]!r}; choose of {', '.join(HEADS)}.")
    if min(width) < 3:
        raise ConfigError(f"--width must be at least 3, got {min(width)}.")
    shapes = [Shape(batch, input_len, output_len) for batch in batch_size]
    check(shapes, repetitions, True, engine)
    settings = head_settings(preset, engine, shapes)
    base = Path(settings.pop("speculative_draft_model_path"))
    found: list[HeadStep] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(stack: ExitStack, head: str, tokens: int) -> LLM:
            draft = write_draft(base, head, tokens, folder / f"{head}-{tokens}")
            return stack.enter_context(LLM(**settings, speculative_draft_model_path=str(draft)))

        for tokens in width:
            with ExitStack() as engines:
                plain = start(engines, PLAIN, tokens)
                for head in heads:
                    with ExitStack() as own:
                        headed = start(own, head, tokens)
                        found += compare_steps(plain, headed, head, tokens, shapes, repetitions)
                where = environment(plain)
    if as_json:
        results = [{**vars(step), "extra": step.extra} for step in found]
        print_json({"settings": settings, "results": results, "environment": where})
        return
    print_table(table(found), where)


def head_settings(preset: str | None, engine: Values, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Settings of all engines, with random weights and a fixed width.

    Raises:
        ConfigError: there is no DFLASH draft whose shapes the heads' drafts could have.
    """
    settings = with_preset(preset or "qwen3-8b", engine)
    if "speculative_draft_model_path" not in settings:
        raise ConfigError("This preset has no DFLASH draft; choose another, or name one.")
    return with_room({**settings, "speculative_adaptive": False}, shapes, random_input=True)


def table(steps: Sequence[HeadStep]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    out.add_column("head", no_wrap=True)
    for name in ("width", "batch", "step ms", "plain draft ms", "more"):
        out.add_column(name, justify="right", no_wrap=True)
    for step in steps:
        times = milliseconds(step.step_seconds), milliseconds(step.plain_seconds)
        sizes = str(step.width), str(step.batch_size)
        out.add_row(step.head, *sizes, *times, f"{step.extra:+.1%}")
    return out
