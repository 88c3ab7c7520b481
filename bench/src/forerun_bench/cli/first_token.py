"""`forerun bench first-token`: time to the first token of short prompts, one or several."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.flags import Values, engine_flags, with_flags
from forerun.cli.output import AsJson
from forerun.cli.settings import with_speculation
from forerun.cli.tables import milliseconds, print_results
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment
from forerun_bench.cli.inputs import Preset, with_preset
from forerun_bench.first_token import FirstToken, first_token

LENGTHS = [1, 16, 64, 128, 256]


@with_flags(engine=engine_flags)
def first_token_command(
    input_len: Annotated[list[int], typer.Option(help="Prompt tokens, one or more")] = LENGTHS,
    *,
    preset: Preset = None,
    batch_size: Annotated[int, typer.Option(help="Requests at once")] = 1,
    repetitions: Annotated[int, typer.Option(help="Runs of each length")] = 15,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Time to the first token, compared with the time of its kernels on the GPU."""
    if min(repetitions, batch_size, *input_len) < 1:
        raise ConfigError("--repetitions, --batch-size and --input-len must be >= 1.")
    if preset is not None:
        engine = with_preset(preset, engine)
    settings = {"max_running_requests": max(4, batch_size), **with_speculation(engine)}
    with LLM(**settings) as llm:
        rows = [first_token(llm.engine, n, repetitions, batch_size) for n in input_len]
        where = environment(llm)
    as_dicts = [row.as_dict() for row in rows]
    print_results(as_dicts, table(rows), settings, where, as_json)


def table(rows: list[FirstToken]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("prompt\ntokens", "first token\nms", "on the GPU\nms", "ratio"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        times = milliseconds(row.seconds), milliseconds(row.gpu_seconds)
        out.add_row(str(row.input_len), *times, ratio)
    return out
