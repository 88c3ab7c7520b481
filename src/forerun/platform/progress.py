"""Progress of what takes long at start: a bar on a terminal, else a line every few seconds.

Both go to standard error. Nothing is shown for what is done quickly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

BAR_AFTER = 1.0  # seconds until a bar is drawn
SECONDS_PER_LINE = 5.0
_REFRESH = 0.2  # seconds between two updates of a bar


@dataclass(eq=False)
class Stage:
    """What is under way. Written by the thread that works, read by the one that shows it."""

    name: str
    total: float | None = None  # None: unknown
    unit: str = ""  # "B": bytes; else what is counted
    done: float = 0
    detail: str = ""
    inner: list[Stage] = field(default_factory=list)  # stages within this one, innermost last

    def advance(self, count: float = 1, detail: str = "") -> None:
        self.done += count
        self.detail = detail

    def line(self) -> str:
        """`"capturing graphs: 12 of 36 (8 x 16 sampled)"`."""
        parts = [self.name]
        if self.unit == "B":
            of = f" of {self.total / 1e9:.1f}" if self.total is not None else ""
            parts.append(f"{self.done / 1e9:.1f}{of} GB")
        elif self.total is not None:
            parts.append(f"{self.done:g} of {self.total:g} {self.unit}".rstrip())
        text = ": ".join(parts)
        detail = self.inner[-1].line() if self.inner else self.detail
        return f"{text} ({detail})" if detail else text


_active: list[Stage] = []  # the stage that is shown, if any


@contextmanager
def progress(
    name: str, total: float | None = None, unit: str = "", console: Console | None = None
) -> Iterator[Stage]:
    """Shows a stage while the block runs; its `advance` says how far it is.

    A stage within another is shown as a part of the outer one's line.

    Args:
        name: what is done, such as "capturing graphs".
        total: what `advance` adds up to, where that is known.
        console: None: standard error.
    """
    stage = Stage(name, total, unit)
    if _active:
        outer = _active[0]
        outer.inner.append(stage)
        try:
            yield stage
        finally:
            outer.inner.remove(stage)
        return
    console = console or Console(stderr=True, soft_wrap=True, highlight=False)
    over = threading.Event()
    thread = threading.Thread(target=_show, args=(stage, console, over), daemon=True)
    _active.append(stage)
    thread.start()
    try:
        yield stage
    finally:
        _active.remove(stage)
        over.set()
        thread.join()


def _show(stage: Stage, console: Console, over: threading.Event) -> None:
    if console.is_terminal:
        if not over.wait(BAR_AFTER):
            _draw(stage, console, over)
        return
    begin = time.monotonic()
    while not over.wait(SECONDS_PER_LINE):
        seconds = time.monotonic() - begin
        console.print(f"forerun: {stage.line()}, {seconds:.0f} s", markup=False)


def _draw(stage: Stage, console: Console, over: threading.Event) -> None:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(stage.line(), total=stage.total)
        while not over.wait(_REFRESH):
            bar.update(task, completed=stage.done, description=stage.line())
