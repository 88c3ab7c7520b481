"""`forerun bench one-batch`: speed of one static batch, plain and speculative."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.flags import Values, engine_flags_without, with_flags
from forerun.cli.output import AsJson, print_json
from forerun.cli.settings import with_speculation, without_speculation
from forerun.cli.tables import milliseconds, print_table, wide_console, yes_no
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment
from forerun.platform.device import resolve_device
from forerun_bench.bounds import Bounds, step_work
from forerun_bench.ceilings import Ceilings
from forerun_bench.cli.inputs import (
    Preset,
    RandomInput,
    check,
    make_prompts,
    with_preset,
    with_room,
)
from forerun_bench.one_batch import BatchTiming, OneBatch, Shape, one_batch
from forerun_bench.profile import keep, profile_steps


@with_flags(engine=engine_flags_without("speculative_adaptive"))
def one_batch_command(
    batch_size: Annotated[list[int], typer.Option(help="One or more: --batch-size 1 4 16")] = [1],  # noqa: B006
    input_len: Annotated[list[int], typer.Option(help="Prompt tokens, one or more")] = [128],  # noqa: B006
    output_len: Annotated[list[int], typer.Option(help="New tokens, one or more")] = [128],  # noqa: B006
    *,
    random_input: RandomInput = False,
    preset: Preset = None,
    repetitions: Annotated[int, typer.Option(help="Runs of each batch, both ways")] = 3,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write traces and kernel tables of some steps (GPU)"),
    ] = None,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Prefill time, step time and decoding speed of one static batch, with lower bounds."""
    if preset is not None:
        engine, random_input = with_preset(preset, engine), True
    shapes = [Shape(b, i, o) for b in batch_size for i in input_len for o in output_len]
    check(shapes, repetitions, random_input, engine)
    ranks = int(engine.get("tp_size") or 1)
    if profile is not None:
        prepare_folder(profile, str(engine.get("device", "auto")), ranks)
    settings = fill_in(engine, shapes, random_input)
    with ExitStack() as stack:
        plain = stack.enter_context(LLM(**without_speculation(settings)))
        spec = None
        if "speculative_algorithm" in settings:
            spec = stack.enter_context(LLM(**settings))
        where = environment(spec or plain)
        simulated = "speculative_simulate_accept_length" in settings
        batches = [make_prompts(plain, shape, random_input) for shape in shapes]
        results = [
            one_batch(plain, spec, prompts, shape.output_len, repetitions, simulated)
            for shape, prompts in zip(shapes, batches, strict=True)
        ]
        device, dtype = torch.device(where["device"]), vars(torch)[where["engine"]["dtype"]]
        # With several ranks the steps are in other processes: nothing here counts their work.
        ceilings = None if ranks > 1 else Ceilings.measure(device, dtype)
        if ceilings is not None:
            results = [
                with_bounds(result, plain, spec, prompts, ceilings, device, profile)
                for result, prompts in zip(results, batches, strict=True)
            ]
    if as_json:
        print_json(
            {
                "settings": settings,
                "input": "random" if random_input else "python",
                "repetitions": repetitions,
                "ceilings": None if ceilings is None else ceilings.as_dict(),
                "results": [result.as_dict() for result in results],
                "environment": where,
            }
        )
        return
    console = wide_console()
    console.print(ceilings.line() if ceilings else NO_CEILINGS, style="dim", soft_wrap=True)
    print_table(table(results, settings.get("speculative_algorithm")), where)
    for remark in filter(None, map(too_few, results)):
        console.print(remark, style="yellow", soft_wrap=True)


NO_CEILINGS = "No floor, GEMMs and host gap with --tp-size; forerun plan estimates a rank's floor."


def too_few(result: OneBatch) -> str | None:
    """A remark if step times are based on too few steps of the whole batch."""
    halves = [half for half in (result.plain, result.spec) if half is not None]
    if not any(half.too_few_steps for half in halves):
        return None
    fewest = min(half.steps for half in halves)
    return (
        f"Batch {result.batch_size}, {result.input_len} + {result.output_len} tokens: all requests"
        f" decode together in only {fewest} steps of a run; the first end while the last still"
        " prefill, or soon after. Raise --output-len (or --chunked-prefill-size)."
    )


def fill_in(engine: Values, shapes: Sequence[Shape], random_input: bool) -> dict[str, Any]:
    """Settings of both engines, with a fixed width."""
    settings = with_speculation(engine) | {"speculative_adaptive": False}
    return with_room(settings, shapes, random_input)


def with_bounds(
    result: OneBatch,
    plain: LLM,
    spec: LLM | None,
    prompts: Sequence[Sequence[int]],
    ceilings: Ceilings,
    device: torch.device,
    folder: Path | None,
) -> OneBatch:
    """Adds the step's lower bounds. Call it after all timing: profiling slows later launches."""

    def bounds(name: str, llm: LLM) -> Bounds:
        work = step_work(llm.engine, result.batch_size, result.context)
        found = Bounds.of(work, ceilings, device)
        if device.type != "cuda":
            return found
        stem = f"{name}-{result.batch_size}x{result.input_len}"
        trace = folder / f"{stem}.trace.json.gz" if folder else None
        timeline = profile_steps(llm.engine, prompts, result.output_len, trace)
        if folder is not None:
            algorithm = llm.explain()["algorithm"]
            how = "plain" if llm is plain else algorithm
            title = f"{how}, batch {result.batch_size}, context {result.input_len}"
            keep(timeline, folder, stem, f"{title}, {torch.cuda.get_device_name(device)}")
        return replace(found, host_gap=timeline.host_gap)

    return replace(
        result,
        plain_bounds=bounds("plain", plain),
        spec_bounds=bounds("spec", spec) if spec is not None else None,
    )


def prepare_folder(folder: Path, device: str, ranks: int) -> None:
    """Creates the folder of `--profile`.

    Raises:
        ConfigError: no profile can be recorded or written.
    """
    if ranks > 1:
        raise ConfigError("--profile records steps of this process; drop it, or --tp-size.")
    if resolve_device(device).type != "cuda":
        raise ConfigError("--profile records GPU kernels and needs a GPU; drop it.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--profile {folder} is a file; name a folder.")
    folder.mkdir(parents=True, exist_ok=True)


HEADS = (
    "prefill\nms", "step\nms", "p90\nms", "decode\ntok/s",
    "floor\nms", "x\nfloor", "gemms\nms", "host\ngap",
)  # fmt: skip


def table(results: Sequence[OneBatch], algorithm: str | None) -> Table:
    """For every shape a line for plain decoding and one for speculation, in 100 columns."""
    out = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    out.add_column("batch x\nin + out", no_wrap=True)
    out.add_column("drafts\nby", no_wrap=True)
    for name in (*HEADS, "speed\nup", "accept\nlength"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("same\ntext", no_wrap=True)
    for r in results:
        shape = f"{r.batch_size} x {r.input_len} + {r.output_len}"
        out.add_row(shape, "-", *_figures(r.plain, r.plain_bounds), "", "", "")
        if r.spec is not None and r.acceptance is not None:
            out.add_row(
                *("", algorithm, *_figures(r.spec, r.spec_bounds)),
                f"{r.speedup:.2f}",
                f"{r.acceptance.accept_length or 0:.2f}",
                yes_no(r.identical),
            )
    return out


def _figures(t: BatchTiming, bounds: Bounds | None) -> list[str]:
    times = [
        milliseconds(s) for s in (t.prefill_seconds, t.step_seconds_median, t.step_seconds_p90)
    ]
    figures = [*times, f"{t.decode_tok_s:.0f}"]
    if bounds is None:
        return [*figures, "", "", "", ""]
    ratio = bounds.ratio(t.step_seconds_median)
    shown = "-" if ratio is None else f"{ratio:.2f}"
    gap = "-" if bounds.host_gap is None else f"{bounds.host_gap:.1%}"
    return [
        *figures,
        milliseconds(bounds.floor_seconds),
        shown,
        milliseconds(bounds.gemm_seconds),
        gap,
    ]
