"""Options of the benchmarks. Imports no torch.

Lists are written as SGLang writes them: `--batch-size 1 4 16`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand

LISTS = (
    "--batch-size",
    "--concurrency",
    "--input-len",
    "--output-len",
    "--accept-length",
    "--algorithms",
    "--heads",
    "--width",
    "--step-ms",
    "--policies",
)


class ListCommand(TyperCommand):
    """Accepts lists of values after the flags in `lists`."""

    lists: ClassVar[tuple[str, ...]] = LISTS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flag(args, self.lists))


class ServingCommand(ListCommand):
    lists = ("--goodput", "--sweep")


def repeat_flag(args: Sequence[str], flags: Sequence[str]) -> list[str]:
    """`--flag 1 2` becomes `--flag 1 --flag 2`; other arguments are unchanged."""
    out: list[str] = []
    current: str | None = None  # a list flag that has its first value already
    for arg in args:
        if current is not None and not arg.startswith("-") and out[-1] != current:
            out.append(current)
        elif arg.startswith("-"):
            current = arg if arg in flags else None
        out.append(arg)
    return out
