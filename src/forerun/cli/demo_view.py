"""Rendering of the demo: two columns side by side, then a table, a histogram and a summary."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.cli.blocks import (
    Block,
    Decode,
    bars,
    brackets,
    has_colour,
    per_step,
    per_token,
    render,
)
from forerun.evals.acceptance import Acceptance
from forerun.evals.compare import Comparison, PromptResult

WIDE = 100  # console columns from which the two texts are side by side
FRAME = 1 / 25  # seconds
REPLAY = 2.0  # minimum seconds of the replay of plain decoding


@dataclass(frozen=True)
class Lane:
    """One of the two texts: `blocks` appear evenly over the measured `seconds`."""

    title: str
    blocks: list[Block]
    seconds: float
    border: str

    def at(self, seconds: float, console: Console, height: int | None = None) -> Panel:
        """The panel this many seconds after the request was submitted."""
        share = min(seconds / self.seconds, 1.0)
        shown = math.floor(share * len(self.blocks) + 1e-9)
        text = render(self.blocks[:shown], console)
        done = shown == len(self.blocks)
        return Panel(
            text,
            title=self.title,
            title_align="left",
            border_style=self.border if done else "dim",
            height=height,
        )


def lanes(result: PromptResult, algorithm: str, decode: Decode) -> tuple[Lane, Lane]:
    meta = result.spec.meta_info
    steps = per_step(
        decode,
        result.spec.output_ids,
        meta["spec_accept_lengths"],
        meta["spec_num_correct_drafts"],
    )
    length = result.acceptance.accept_length
    per = f", {length:.1f} tokens a step" if length else ""
    plain = Lane(
        f"plain: {result.plain_tok_s:.0f} tok/s",
        per_token(decode, result.plain.output_ids),
        result.plain_seconds,
        "white",
    )
    spec = Lane(
        f"{algorithm}: {result.spec_tok_s:.0f} tok/s{per}",
        steps,
        result.spec_seconds,
        "green",
    )
    return plain, spec


class Show:
    """Prints prompts as they are measured; on a terminal, replays both with the same slowdown."""

    def __init__(
        self, console: Console, algorithm: str, decode: Decode, *, live: bool = True
    ) -> None:
        self.console = console
        self.algorithm = algorithm
        self.decode = decode
        self.live = live and console.is_terminal
        self.slowdown: int | None = None  # chosen at the first prompt, kept for all

    def opening(self) -> None:
        before, after = brackets(self.console)
        look = "coloured" if has_colour(self.console) else f"in {before}brackets{after}"
        self.console.print(
            f"Accepted drafts are {look}; the other tokens were sampled by the target.\n"
        )

    def prompt(self, result: PromptResult) -> None:
        pair = lanes(result, self.algorithm, self.decode)
        self.console.print(Text(f"{result.prompt.name}  ({result.prompt.skill})", style="bold"))
        self.console.print(Text(_tail(result.prompt.text), style="dim"))
        groups = [pair] if self.console.width >= WIDE else [(lane,) for lane in pair]
        for group in groups:
            if self.live:
                self._replay(group)
            else:
                self.console.print(self._frame(group, math.inf))
        self.console.print()

    def _replay(self, group: tuple[Lane, ...]) -> None:
        if self.slowdown is None:
            self.slowdown = max(1, round(REPLAY / group[0].seconds))
            if self.slowdown > 1:
                self.console.print(f"(shown {self.slowdown} times slower than measured)")
        end = max(lane.seconds for lane in group)
        begin = time.perf_counter()
        with Live(console=self.console, auto_refresh=False) as screen:
            while (now := (time.perf_counter() - begin) / self.slowdown) < end:
                screen.update(self._frame(group, now), refresh=True)
                time.sleep(FRAME)
            screen.update(self._frame(group, end), refresh=True)

    def _frame(self, group: tuple[Lane, ...], seconds: float) -> RenderableType:
        if len(group) == 1:
            return group[0].at(seconds, self.console)
        grid = Table.grid(expand=True, padding=(0, 1))
        for _ in group:
            grid.add_column(ratio=1, overflow="fold")
        grid.add_row(*(lane.at(seconds, self.console) for lane in group))
        return grid

    def closing(self, comparison: Comparison) -> None:
        self.console.print(summary(comparison, self.algorithm, self.console))


def summary(comparison: Comparison, algorithm: str, console: Console) -> Group:
    """The table, the histogram and the summary lines."""
    whole = comparison.acceptance
    length = f"{whole.accept_length:.2f}" if whole.accept_length else "-"
    count = len(comparison.prompts)
    return Group(
        speed_table(comparison, algorithm),
        Text(),
        Text("Accepted drafts per verify step", style="bold"),
        histogram(whole, console),
        Text(),
        Text(f"identical: {_yes(comparison.identical)}"),
        Text(f"accept length: {length} tokens per verify step, including the bonus token"),
        Text(f"speed-up: {comparison.speedup:.2f} (median over {count} prompts)"),
    )


def speed_table(comparison: Comparison, algorithm: str) -> Table:
    table = Table(title="Batch size 1, whole requests", title_justify="left")
    table.add_column("prompt", no_wrap=True)
    for name in ("tokens", "plain\ntok/s", f"{algorithm}\ntok/s", "speed-up", "accept\nlength"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("identical", no_wrap=True)
    for p in comparison.prompts:
        table.add_row(
            p.prompt.name,
            str(p.tokens),
            f"{p.plain_tok_s:.0f}",
            f"{p.spec_tok_s:.0f}",
            f"{p.speedup:.2f}",
            f"{p.acceptance.accept_length or 0:.2f}",
            _yes(p.identical),
        )
    table.add_section()
    table.add_row(
        "median",
        "",
        f"{comparison.plain_tok_s:.0f}",
        f"{comparison.spec_tok_s:.0f}",
        f"{comparison.speedup:.2f}",
        "",
        _yes(comparison.identical),
        style="bold",
    )
    return table


def histogram(acceptance: Acceptance, console: Console) -> Table:
    """Shows for each number of accepted drafts the fraction of verify steps with it."""
    steps = max(acceptance.verify_ct, 1)
    return bars(console, [(str(a), n / steps) for a, n in enumerate(acceptance.histogram)])


def positions(acceptance: Acceptance, console: Console) -> Table:
    """Shows for each draft position the fraction of verify steps that accepted it."""
    shares = enumerate(acceptance.per_position, start=1)
    return bars(console, [(str(position), share) for position, share in shares])


def _tail(text: str, lines: int = 8) -> str:
    """The last lines of a prompt."""
    rows = text.rstrip().splitlines()
    return "\n".join(rows if len(rows) <= lines else ["...", *rows[-lines:]])


def _yes(value: bool) -> str:
    return "yes" if value else "no"
