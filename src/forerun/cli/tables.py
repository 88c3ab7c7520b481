"""Output of the benchmarks: tables and the figures in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from forerun.cli.output import print_json
from forerun.evals.environment import made_with

COLUMNS = 100  # width of the tables


def wide_console() -> Console:
    """Returns a console at least `COLUMNS` wide: a pipe would get 80, and truncated tables."""
    return Console(width=max(COLUMNS, Console().width))


def print_table(table: Table, where: Mapping[str, Any]) -> None:
    """The table, and the line under it from `environment(llm)`."""
    console = wide_console()
    console.print(table)
    console.print(made_with(where), style="dim", soft_wrap=True)


def print_results(
    rows: Sequence[Mapping[str, Any]],
    table: Table,
    settings: Mapping[str, Any],
    where: Mapping[str, Any],
    as_json: bool,
) -> None:
    """`rows` with settings and environment as JSON, or the table of them."""
    if as_json:
        print_json({"settings": settings, "results": rows, "environment": where})
    else:
        print_table(table, where)


def yes_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def milliseconds(seconds: float | None) -> str:
    """Writes it with three or more digits; "-" for None."""
    if seconds is None:
        return "-"
    ms = 1000 * seconds
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"
