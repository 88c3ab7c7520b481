"""`forerun bench widths`: width policies compared with plain decoding and with one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from forerun import LLM
from forerun.cli.flags import Values, engine_flags_without, with_flags
from forerun.cli.output import AsJson, print_json, progress_bar
from forerun.cli.settings import with_speculation
from forerun.cli.tables import print_table, yes_no
from forerun.core.errors import ConfigError
from forerun.evals.environment import environment
from forerun.evals.prompts import chat_encoder, word_prompts
from forerun.platform.device import resolve_device
from forerun.speculative.simulate import accept_lengths
from forerun_bench.cli.inputs import (
    Preset,
    RandomInput,
    check,
    make_prompts,
    with_preset,
    with_room,
)
from forerun_bench.one_batch import Shape
from forerun_bench.widths import POLICIES, Cell, Load, engines, measure


@with_flags(engine=engine_flags_without("speculative_adaptive"))
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
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Prompts: word problems and Python in turn")
    ] = False,
    preset: Preset = None,
    policies: Annotated[
        list[str], typer.Option(help="Two or more of plain, full, single, ragged")
    ] = list(POLICIES),  # noqa: B006
    repetitions: Annotated[int, typer.Option(help="Runs of each batch and policy")] = 3,
    as_json: AsJson = False,
    engine: Values,
) -> None:
    """Tokens/s of plain decoding, full width, one width for all requests, and ragged steps.

    On a CPU all engines are loaded and their runs interleaved; on a GPU one engine after the other
    has all of the memory.
    """
    loads = Loads(batch_size, accept_length, input_len, output_len, repetitions, mixed)
    found = compare_widths(
        *(loads, chosen(policies), with_input(engine, preset, random_input)), quiet=as_json
    )
    if as_json:
        print_json({**found.as_dict(), "results": [cell.as_dict() for cell in found.cells]})
    else:
        print_table(table(found.cells), found.environment)


@dataclass(frozen=True)
class Loads:
    """What is measured: every batch size at every accept length."""

    batch_sizes: Sequence[int]
    lengths: Sequence[str]  # simulated; none: real acceptance
    input_len: int
    output_len: int
    repetitions: int
    mixed: bool = False  # word problems and Python in turn, up to `input_len` tokens of each

    @property
    def shapes(self) -> list[Shape]:
        return [Shape(batch, self.input_len, self.output_len) for batch in self.batch_sizes]

    def prompts(self, llm: LLM, shape: Shape, random_input: bool) -> list[list[int]]:
        if not self.mixed:
            return make_prompts(llm, shape, random_input)
        count = -(-shape.batch_size // 2)
        words = word_prompts(chat_encoder(llm.tokenizer), count)
        python = make_prompts(llm, replace(shape, batch_size=count), False)
        pairs = zip((list(each.ids[: shape.input_len]) for each in words), python, strict=True)
        return [prompt for pair in pairs for prompt in pair][: shape.batch_size]

    def cells(self) -> list[Cell]:
        lengths = list[str | None](self.lengths) or [None]
        return [Cell(Load(batch, each)) for batch in self.batch_sizes for each in lengths]


@dataclass(frozen=True)
class Found:
    """The measured cells, and with what."""

    settings: Mapping[str, Any]
    cells: Sequence[Cell]
    policy: Mapping[str, Any]  # the state of the last one
    environment: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "policy": self.policy,
            "environment": self.environment,
        }


def with_input(engine: Values, preset: str | None, random_input: bool) -> tuple[Values, bool]:
    """Settings of the engine, and whether prompts are random: a preset has random weights."""
    return (engine, random_input) if preset is None else (with_preset(preset, engine), True)


def compare_widths(
    loads: Loads, names: Sequence[str], given: tuple[Values, bool], quiet: bool
) -> Found:
    """Measures the loads with these policies.

    Args:
        given: as of `with_input`.
        quiet: no progress is shown.

    Raises:
        ConfigError: they cannot be measured.
    """
    engine, random_input = given
    if loads.mixed and (random_input or loads.lengths):
        raise ConfigError("--mixed is for real text and acceptance; drop it, or what makes it up.")
    check(loads.shapes, loads.repetitions, random_input, engine)
    settings = widths_settings(engine, loads.shapes, loads.lengths, random_input)
    cells, kinds = loads.cells(), engines(settings, names)
    on_cpu = resolve_device(str(engine.get("device", "auto"))).type == "cpu"
    groups = [kinds] if on_cpu else [[kind] for kind in kinds]
    with progress_bar(quiet) as bar:
        task = bar.add_task("measuring", total=len(groups) * len(cells))

        def run(group: Sequence[tuple[Values, Sequence[str]]]) -> tuple[Values, Values]:
            """Measures all cells; nothing refers to the engines once it returns, so that the next
            ones have their memory."""
            with ExitStack() as stack:
                llms = [(stack.enter_context(LLM(**own)), of) for own, of in group]
                for cell in cells:
                    shape = Shape(cell.load.batch_size, loads.input_len, loads.output_len)
                    prompts = loads.prompts(llms[0][0], shape, random_input)
                    measure(llms, cell, prompts, loads.output_len, loads.repetitions)
                    bar.advance(task)
                last = llms[-1][0]
                return environment(last), last.engine.scheduler.widths.as_dict()

        where, policy = [run(group) for group in groups][-1]
    return Found(settings, cells, policy, where)


def chosen(names: Sequence[str]) -> list[str]:
    """The named policies, in the order of `POLICIES`.

    Raises:
        ConfigError: a name is unknown, or there is only one.
    """
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError(f"Unknown policy {unknown[0]!r}; known: {', '.join(POLICIES)}.")
    if len(set(names)) < 2:
        raise ConfigError("--policies needs two or more, to compare them.")
    return [name for name in POLICIES if name in names]


def widths_settings(
    engine: Values, shapes: Sequence[Shape], lengths: Sequence[str], random_input: bool
) -> dict[str, Any]:
    """Settings that all engines share.

    Raises:
        ConfigError: there is nothing to compare, or accept lengths are given in another way.
    """
    settings = with_room(with_speculation(engine), shapes, random_input)
    if "speculative_algorithm" not in settings:
        raise ConfigError("Width policies need --speculative-algorithm.")
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
    names, judged = sorted(cells[0].tok_s, key=POLICIES.index), cells[0].judged
    out.add_column("batch", justify="right")
    out.add_column("accept\nlength", justify="right")
    for name in (*(f"{each}\ntok/s" for each in names), "over the\nbest", "over\nplain"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column(f"{judged} steps by width")
    out.add_column("same\ntext", no_wrap=True)
    for cell in cells:
        out.add_row(
            *(str(cell.load.batch_size), cell.load.lengths or f"{cell.accept_length[judged]:.2f}"),
            *(f"{cell.tok_s[each]:.0f}" if cell.tok_s[each] else "-" for each in names),
            "-" if cell.over_best is None else f"{cell.over_best:.3f}",
            "-" if cell.over_plain is None else f"{cell.over_plain:.2f}",
            shares(cell.widths[judged]),
            yes_no(cell.identical),
        )
    if not all(speed for cell in cells for speed in cell.tok_s.values()):
        out.caption = "-: no step had all requests; the batch does not fit into the K/V"
    return out


def shares(widths: dict[float, int]) -> str:
    """`"1: 95 %, 4: 5 %"`."""
    whole = sum(widths.values())
    return ", ".join(f"{width}: {count / whole:.0%}" for width, count in sorted(widths.items()))
