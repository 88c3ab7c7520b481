"""Progress of long operations at start: a bar on a terminal, else a line every few seconds.

Written to standard error. Operations that finish quickly show nothing.
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
    """A running operation; updated by the thread that executes it, read by the display thread."""

    name: str
    total: float | None = None  # None: unknown
    unit: str = ""  # "B" for bytes
    done: float = 0
    detail: str = ""
    inner: list[Stage] = field(default_factory=list)  # nested stages, innermost last

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


_active: list[Stage] = []  # the outermost running stage, if any


@contextmanager
def progress(
    name: str, total: float | None = None, unit: str = "", console: Console | None = None
) -> Iterator[Stage]:
    """Shows the progress of the block; its `advance` updates it.

    A nested stage is shown within the line of the outer one.

    Args:
        name: of the operation, such as "capturing graphs".
        total: sum of all `advance` calls, if known.
        unit: of `total`; "B" for bytes.
        console: default: standard error.
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
    finished = threading.Event()
    thread = threading.Thread(target=_show, args=(stage, console, finished), daemon=True)
    _active.append(stage)
    thread.start()
    try:
        yield stage
    finally:
        _active.remove(stage)
        finished.set()
        thread.join()


def _show(stage: Stage, console: Console, finished: threading.Event) -> None:
    if console.is_terminal:
        if not finished.wait(BAR_AFTER):
            _draw(stage, console, finished)
        return
    begin = time.monotonic()
    while not finished.wait(SECONDS_PER_LINE):
        seconds = time.monotonic() - begin
        console.print(f"forerun: {stage.line()}, {seconds:.0f} s", markup=False)


def _draw(stage: Stage, console: Console, finished: threading.Event) -> None:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(stage.line(), total=stage.total)
        while not finished.wait(_REFRESH):
            bar.update(task, completed=stage.done, description=stage.line())
