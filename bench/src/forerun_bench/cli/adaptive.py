"""`forerun bench adaptive`, deprecated: `forerun bench widths --policies plain full single`, with
the defaults and the JSON keys that the command had.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from forerun.cli.flags import Values, engine_flags_without, with_flags
from forerun.cli.output import AsJson, print_json
from forerun.cli.tables import print_table
from forerun_bench.cli.inputs import Preset, RandomInput
from forerun_bench.cli.widths import Loads, compare_widths, table, with_input
from forerun_bench.widths import FULL, PLAIN, SINGLE, Cell

WARNING = (
    "forerun: warning: `bench adaptive` is deprecated and will be removed in 0.5;"
    " `bench widths --policies plain full single` measures the same."
)


@with_flags(engine=engine_flags_without("speculative_adaptive"))
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
    """Deprecated: `bench widths --policies plain full single`."""
    print(WARNING, file=sys.stderr)
    lengths = [f"{length:g}" for length in accept_length]
    loads = Loads(batch_size, lengths, input_len, output_len, repetitions)
    given = with_input(engine, preset, random_input)
    found = compare_widths(loads, (PLAIN, FULL, SINGLE), given, quiet=as_json)
    if as_json:
        print_json({**found.as_dict(), "results": [old_keys(cell) for cell in found.cells]})
    else:
        print_table(table(found.cells), found.environment)


def old_keys(cell: Cell) -> dict[str, Any]:
    """A cell as the command showed it before."""
    length = cell.load.lengths
    return {
        "batch_size": cell.load.batch_size,
        "simulated": None if length is None else float(length),
        "plain": cell.tok_s[PLAIN],
        "fixed": cell.tok_s[FULL],
        "adaptive": cell.tok_s[SINGLE],
        "widths": cell.widths[SINGLE],
        "accept_length": cell.accept_length[FULL],
        "identical": cell.identical,
        "ratio": cell.over_best,
    }
