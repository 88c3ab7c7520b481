"""`forerun bench widths`: ragged steps compared with plain decoding and with equal widths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.flags import Values, engine_flags, with_flags
from forerun.cli.output import AsJson, print_json, progress_bar
from forerun.cli.settings import with_speculation
from forerun.cli.tables import print_table, yes_no
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment
from forerun.speculative.simulate import accept_lengths
from forerun_bench.cli.adaptive import shares
from forerun_bench.cli.inputs import (
    Preset,
    RandomInput,
    check,
    make_prompts,
    with_preset,
    with_room,
)
from forerun_bench.one_batch import Shape
from forerun_bench.widths import POLICIES, RAGGED, Cell, Load, engines, measure


@with_flags(engine=engine_flags)
def widths_command(
    batch_size: Annotated[list[int], typer.Option(help="One or more")] = [1, 4, 16],  # noqa: B006
    accept_length: Annotated[
        list[str],
        typer.Option(
            help="Simulated, one or more. 1.3,5: half of the requests 1.3, half 5."
            " Default: real acceptance"
        ),
    ] = [],  # noqa: B006
    input_len: Annotated[int, typer.Option(help="Prompt tokens")] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens")] = 256,
    *,
    random_input: RandomInput = False,
    preset: Preset = None,
    repetitions: Annotated[int, typer.Option(help="Runs of each batch and policy")] = 3,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Tokens/s of plain decoding, full width, one width for all requests, and ragged steps."""
    if preset is not None:
        engine, random_input = with_preset(preset, engine), True
    shapes = [Shape(batch, input_len, output_len) for batch in batch_size]
    check(shapes, repetitions, random_input, engine)
    settings = widths_settings(engine, shapes, accept_length, random_input)
    lengths = list[str | None](accept_length) or [None]
    cells = [Cell(Load(batch, each)) for batch in batch_size for each in lengths]
    kinds = engines(settings)

    def prompts_of(llm: LLM, batch: int) -> list[list[int]]:
        return make_prompts(llm, Shape(batch, input_len, output_len), random_input)

    policy: dict[str, Any] = {}
    with progress_bar(as_json) as bar:
        task = bar.add_task("measuring", total=len(kinds) * len(cells))
        for own, names in kinds:
            with LLM(**own) as llm:
                run = partial(measure, llm, names, prompts_of=prompts_of, output_len=output_len)
                for cell in cells:
                    run(cells=[cell], repetitions=repetitions)
                    bar.advance(task)
                where, policy = environment(llm), llm.engine.scheduler.widths.as_dict()
    if as_json:
        results = [cell.as_dict() for cell in cells]
        print_json(
            {"settings": settings, "results": results, "policy": policy, "environment": where}
        )
        return
    print_table(table(cells), where)


def widths_settings(
    engine: Values, shapes: Sequence[Shape], lengths: Sequence[str], random_input: bool
) -> dict[str, Any]:
    """Settings that all engines share.

    Raises:
        ConfigError: there is nothing to compare, or accept lengths are given in another way.
    """
    settings = with_room(with_speculation(engine), shapes, random_input)
    if "speculative_algorithm" not in settings:
        raise ConfigError("Ragged steps need --speculative-algorithm.")
    if "speculative_simulate_accept_length" in settings:
        raise ConfigError("Give simulated accept lengths as --accept-length, one or more.")
    if random_input and not lengths:
        raise ConfigError("Drafts of random text are not accepted; give --accept-length.")
    if lengths:  # the largest is checked against the verify width
        settings["speculative_simulate_accept_length"] = max(
            max(accept_lengths(each)) for each in lengths
        )
    return settings


def table(cells: Sequence[Cell]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    out.add_column("batch", justify="right")
    out.add_column("accept\nlength", justify="right")
    for name in (*(f"{each}\ntok/s" for each in POLICIES), "over the\nbest", "over\nplain"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("ragged steps by width")
    out.add_column("same\ntext", no_wrap=True)
    for cell in cells:
        real = cell.accept_length[RAGGED] or 0.0
        out.add_row(
            *(str(cell.load.batch_size), cell.load.lengths or f"{real:.2f}"),
            *(f"{cell.tok_s[each]:.0f}" for each in POLICIES),
            *(f"{cell.over_best:.3f}", f"{cell.over_plain:.2f}"),
            shares(cell.widths[RAGGED]),
            yes_no(cell.identical),
        )
    return out
