"""`forerun bench long-prompt`: inter-token latency while a long prompt is computed."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.counts import check_counts
from forerun.cli.flags import Values, engine_flags, with_flags
from forerun.cli.output import AsJson
from forerun.cli.settings import with_speculation
from forerun.cli.tables import milliseconds, print_results
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment
from forerun.evals.timing import interleaved
from forerun_bench.cli.inputs import Preset, with_preset
from forerun_bench.long_prompt import SHORT_LEN, LongPrompt, run_once, summary

BOUNDS = [0, 400, 200, 100]


@with_flags(engine=engine_flags)
def long_prompt_command(
    input_len: Annotated[int, typer.Option(help="Tokens of the long prompt")] = 3800,
    *,
    preset: Preset = None,
    running: Annotated[int, typer.Option(help="Requests that decode")] = 4,
    step_ms: Annotated[
        list[int], typer.Option(help="Values of --max-mixed-step-ms, one or more")
    ] = BOUNDS,
    repetitions: Annotated[int, typer.Option(help="Runs of each value")] = 3,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Inter-token latency of running requests while a long prompt is computed beside them."""
    check_counts(repetitions=repetitions)
    if min(running, input_len - SHORT_LEN) < 1 or min(step_ms) < 0:
        raise ConfigError(f"--running must be >= 1, --input-len > {SHORT_LEN} and --step-ms >= 0.")
    if preset is not None:
        engine = with_preset(preset, engine)
    settings = {"max_running_requests": running + 2, **with_speculation(engine)}
    with LLM(**settings) as llm:
        run_once(llm.engine, running, input_len, 0)  # warm-up
        of_bound = {
            str(ms): partial(run_once, llm.engine, running, input_len, ms) for ms in step_ms
        }
        runs = interleaved(of_bound, repetitions)
        rows = [summary(int(ms), [run.value for run in runs[ms]]) for ms in runs]
        where = environment(llm)
    as_dicts = [row.as_dict() for row in rows]
    print_results(as_dicts, table(rows), settings, where, as_json)


def table(rows: list[LongPrompt]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    names = (
        "--max-mixed-\nstep-ms", "alone\nms", "p50\nms", "p99\nms", "longest\nms",
        "first token\nlong, ms", "first token\nshort, ms",
    )  # fmt: skip
    for name in names:
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times = row.alone, row.p50, row.p99, row.longest, row.first_token, row.short_first_token
        out.add_row(str(row.step_ms), *map(milliseconds, times))
    return out
