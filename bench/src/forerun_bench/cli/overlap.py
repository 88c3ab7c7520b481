"""`forerun bench overlap`: overlap scheduling on and off."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.flags import Values, engine_flags_without, with_flags
from forerun.cli.output import AsJson
from forerun.cli.settings import with_speculation
from forerun.cli.tables import milliseconds, print_results, yes_no
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment
from forerun.platform.device import resolve_device
from forerun_bench.cli.inputs import (
    Preset,
    RandomInput,
    check,
    make_prompts,
    with_preset,
    with_room,
)
from forerun_bench.one_batch import OneBatch, Shape, one_batch
from forerun_bench.profile import profile_steps


@with_flags(engine=engine_flags_without("speculative_adaptive"))
def overlap_command(
    batch_size: Annotated[list[int], typer.Option(help="One or more")] = [1, 8, 32],  # noqa: B006
    input_len: Annotated[int, typer.Option(help="Prompt tokens")] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens")] = 128,
    *,
    random_input: RandomInput = False,
    preset: Preset = None,
    repetitions: Annotated[int, typer.Option(help="Runs of each batch, both ways")] = 3,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Tokens/s with overlap scheduling on and off, and the gap between steps on the GPU."""
    if preset is not None:
        engine, random_input = with_preset(preset, engine), True
    shapes = [Shape(batch, input_len, output_len) for batch in batch_size]
    check(shapes, repetitions, random_input, engine)
    if engine.get("disable_overlap_schedule"):
        raise ConfigError("Both are measured; drop --disable-overlap-schedule.")
    if resolve_device(str(engine.get("device", "auto"))).type != "cuda":
        raise ConfigError("Overlap scheduling needs a GPU.")
    settings = with_room(with_speculation(engine), shapes, random_input)
    settings["speculative_adaptive"] = False
    simulated = "speculative_simulate_accept_length" in settings
    with ExitStack() as stack:
        off = stack.enter_context(LLM(**settings, disable_overlap_schedule=True))
        on = stack.enter_context(LLM(**settings))
        batches = [make_prompts(on, shape, random_input) for shape in shapes]
        results = [one_batch(off, on, ids, output_len, repetitions, simulated) for ids in batches]
        gaps = [  # after all timing: profiling slows later launches down
            tuple(profile_steps(llm.engine, ids, output_len).host_gap for llm in (off, on))
            for ids in batches
        ]
        where = environment(on)
    rows = [row(result, *gap) for result, gap in zip(results, gaps, strict=True)]
    print_results(rows, table(rows), settings, where, as_json)


def row(result: OneBatch, gap_off: float | None, gap_on: float | None) -> dict[str, Any]:
    """`result.plain` is without overlap, `result.spec` with it."""
    assert result.spec is not None and result.acceptance is not None
    return {
        "batch_size": result.batch_size,
        "off_tok_s": result.plain.decode_tok_s,
        "on_tok_s": result.spec.decode_tok_s,
        "on_over_off": result.speedup,
        "off_step_seconds": result.plain.step_seconds_median,
        "on_step_seconds": result.spec.step_seconds_median,
        "off_host_gap": gap_off,
        "on_host_gap": gap_on,
        "accept_length": result.acceptance.accept_length,
        "identical": result.identical,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    heads = ("batch", "off\ntok/s", "on\ntok/s", "on over\noff", "off step\nms", "on step\nms")
    for name in (*heads, "off host\ngap", "on host\ngap", "accept\nlength"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("same\ntext", no_wrap=True)
    for r in rows:
        gaps = ["-" if g is None else f"{g:.1%}" for g in (r["off_host_gap"], r["on_host_gap"])]
        out.add_row(
            *(str(r["batch_size"]), f"{r['off_tok_s']:.0f}", f"{r['on_tok_s']:.0f}"),
            f"{r['on_over_off']:.3f}",
            *(milliseconds(r[f"{way}_step_seconds"]) for way in ("off", "on")),
            *(*gaps, f"{r['accept_length'] or 0:.2f}"),
            yes_no(r["identical"]),
        )
    return out
