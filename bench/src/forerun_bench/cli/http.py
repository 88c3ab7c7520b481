"""`forerun bench http`: tokens/s through a server's streams, compared with the engine alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.flags import Values, engine_flags, with_flags
from forerun.cli.output import AsJson
from forerun.cli.settings import with_speculation
from forerun.cli.tables import print_results
from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment
from forerun_bench.cli.inputs import Preset, check, make_prompts, with_preset, with_room
from forerun_bench.dummy_tokenizer import write_dummy_tokenizer
from forerun_bench.http import Comparison, Workload, compare
from forerun_bench.one_batch import Shape
from forerun_bench.serving.local import LocalServer

BACKENDS = ("openai", "sglang")
ROUNDS = 4  # requests one after the other, if their number is not given


@with_flags(engine=engine_flags)
def http_command(
    concurrency: Annotated[list[int], typer.Option(help="Requests at once, one or more")] = [16],  # noqa: B006
    input_len: Annotated[int, typer.Option(help="Prompt tokens")] = 128,
    output_len: Annotated[
        int, typer.Option(help="Most new tokens; lengths are spread from half of it")
    ] = 256,
    *,
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests of a run; default: 4 x concurrency")
    ] = None,
    backend: Annotated[str, typer.Option(help=f"API to use ({', '.join(BACKENDS)})")] = BACKENDS[0],
    preset: Preset = None,
    repetitions: Annotated[int, typer.Option(help="Runs of each, both ways, in turns")] = 3,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Starts a server and an engine with the same flags, and sends both the same requests."""
    if preset is not None:
        engine = with_preset(preset, engine)
    if backend not in BACKENDS:
        raise ConfigError(f"--backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    shapes = [Shape(count, input_len, output_len) for count in concurrency]
    check(shapes, repetitions, preset is not None, engine)
    if num_prompts is not None and num_prompts < max(concurrency):
        raise ConfigError("--num-prompts must be at least --concurrency.")
    with TemporaryDirectory() as folder:
        settings = with_room(with_speculation(engine), shapes, random_input=False)
        if preset is not None:
            model = load_model_config(Path(settings["model_path"]))
            write_dummy_tokenizer(Path(folder), model.vocab_size)
            settings["tokenizer_path"] = folder
        # One after the other: starting measures memory and times of steps.
        with LocalServer(settings) as server, LLM(**settings) as llm:
            results = []
            for shape in shapes:
                count = num_prompts or ROUNDS * shape.batch_size
                many = Shape(count, input_len, output_len)
                prompts = make_prompts(llm, many, random_input=preset is not None)
                load = Workload.of(prompts, output_len, shape.batch_size)
                results.append(compare(llm.engine, server.url, backend, load, repetitions))
            where = environment(llm)
    as_dicts = [result.as_dict() for result in results]
    print_results(as_dicts, table(results), settings, where, as_json)


def table(results: Sequence[Comparison]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    heads = ("at once", "requests", "engine\ntok/s", "HTTP\ntok/s", "HTTP over\nengine")
    for name in (*heads, "engine\nhost gap", "HTTP\nhost gap"):
        out.add_column(name, justify="right", no_wrap=True)
    for result in results:
        row = result.as_dict()
        sides = [row["in_process"], row["http"]]
        gaps = ["-" if s["host_gap"] is None else f"{s['host_gap']:.2%}" for s in sides]
        out.add_row(
            *(str(row["concurrency"]), str(row["num_prompts"])),
            *(f"{side['tok_s']:.0f}" for side in sides),
            f"{result.ratio:.3f}",
            *gaps,
        )
    return out
