"""`forerun bench adaptive`: adaptive width compared with plain decoding and the full width."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.flags import Values, engine_flags, with_flags
from forerun.cli.output import AsJson, print_json, progress_bar
from forerun.cli.settings import with_speculation, without_speculation
from forerun.cli.tables import print_table, yes_no
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment
from forerun_bench.adaptive import Cell, sweep
from forerun_bench.cli.inputs import (
    Preset,
    RandomInput,
    check,
    make_prompts,
    with_preset,
    with_room,
)
from forerun_bench.one_batch import Shape


@with_flags(engine=engine_flags)
def adaptive_command(
    batch_size: Annotated[list[int], typer.Option(help="One or more")] = [1, 2, 4, 8, 16],  # noqa: B006
    accept_length: Annotated[
        list[float], typer.Option(help="Simulated, one or more; default: real acceptance")
    ] = [],  # noqa: B006
    input_len: Annotated[int, typer.Option(help="Prompt tokens")] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens")] = 64,
    *,
    random_input: RandomInput = False,
    preset: Preset = None,
    repetitions: Annotated[int, typer.Option(help="Runs of each batch and policy")] = 3,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Tokens/s of plain decoding, the full width, and adaptive width, which must not be slower."""
    if preset is not None:
        engine, random_input = with_preset(preset, engine), True
    shapes = [Shape(batch, input_len, output_len) for batch in batch_size]
    check(shapes, repetitions, random_input, engine)
    settings = adaptive_settings(engine, shapes, accept_length, random_input)
    with ExitStack() as stack:
        plain = stack.enter_context(LLM(**without_speculation(settings)))
        spec = stack.enter_context(LLM(**settings))
        batches = [make_prompts(plain, shape, random_input) for shape in shapes]
        with progress_bar(as_json) as bar:
            task = bar.add_task("measuring", total=len(batches) * max(1, len(accept_length)))
            cells = sweep(
                *(plain, spec, batches, output_len, accept_length, repetitions),
                on_cell=lambda cell: bar.advance(task),
            )
        where = environment(spec)
        policy = spec.engine.scheduler.widths.as_dict()
    if as_json:
        results = [cell.as_dict() for cell in cells]
        print_json(
            {"settings": settings, "results": results, "policy": policy, "environment": where}
        )
        return
    print_table(table(cells), where)


def adaptive_settings(
    engine: Values, shapes: Sequence[Shape], lengths: Sequence[float], random_input: bool
) -> dict[str, Any]:
    """Settings of the engine with drafts.

    Raises:
        ConfigError: adaptive width does not apply.
    """
    settings = with_room(with_speculation(engine), shapes, random_input)
    if "speculative_algorithm" not in settings:
        raise ConfigError("Adaptive width needs --speculative-algorithm.")
    if "speculative_simulate_accept_length" in settings:
        raise ConfigError("Give simulated accept lengths as --accept-length, one or more.")
    if any(length < 1 for length in lengths):
        raise ConfigError(f"--accept-length must be at least 1, got {min(lengths)}.")
    if random_input and not lengths:
        raise ConfigError("Drafts of random text are not accepted; give --accept-length.")
    if lengths:  # the largest is checked against the verify width
        settings["speculative_simulate_accept_length"] = max(lengths)
    return settings | {"speculative_adaptive": True}


def table(cells: Sequence[Cell]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    out.add_column("batch", justify="right")
    out.add_column("accept\nlength", justify="right")
    for name in ("plain\ntok/s", "full\ntok/s", "adaptive\ntok/s", "over the\nbetter"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("steps by width")
    out.add_column("same\ntext", no_wrap=True)
    for c in cells:
        length = c.accept_length or 0.0
        out.add_row(
            *(str(c.batch_size), f"{length:.2f}" if c.simulated is None else f"{c.simulated:g}"),
            *(f"{speed:.0f}" for speed in (c.plain, c.fixed, c.adaptive)),
            f"{c.ratio:.3f}",
            shares(c.widths),
            yes_no(c.identical),
        )
    return out


def shares(widths: dict[float, int]) -> str:
    """`"1: 95 %, 4: 5 %"`."""
    whole = sum(widths.values())
    return ", ".join(f"{width}: {count / whole:.0%}" for width, count in widths.items())
