"""Progress of downloads: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn

SECONDS_PER_LINE = 5.0
BYTES_BAR = "huggingface_hub.snapshot_download"  # the library's name of the bar that counts bytes


class DownloadProgress:
    """Progress of one model's download; a context manager around each part of it.

    Nothing is shown before bytes arrive, so a model that is in the cache starts silently.
    """

    def __init__(
        self,
        name: str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`console`: default: standard error."""
        self._name, self._clock = name, clock
        self._console = console or Console(stderr=True, soft_wrap=True, highlight=False)
        self._lock = threading.Lock()  # files are downloaded by several threads
        self._part = self._done = 0.0  # bytes
        self._last_line: float | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> None:
        """Begins a part; the first `advance` shows it."""
        self._part = 0.0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def advance(self, count: float, total: float | None) -> None:
        """Adds `count` bytes. `total`: bytes of this part, as far as its files are known."""
        with self._lock:
            self._part += count
            self._done += count
            if self._console.is_terminal:
                self._draw(total)
            else:
                self._print()

    def _draw(self, total: float | None) -> None:
        if self._bar is None:
            columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(f"Downloading {self._name}", total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=self._part, total=total)

    def _print(self) -> None:
        from huggingface_hub import constants

        now = self._clock()
        if self._last_line is None:
            line = f"from {constants.ENDPOINT} into {constants.HF_HUB_CACHE}"
        elif now - self._last_line >= SECONDS_PER_LINE:
            line = f"{self._done / 1e6:,.0f} MB so far"
        else:
            return
        self._last_line = now
        self._console.print(f"forerun: downloading {self._name}: {line}", markup=False)


def progress_bar_class(progress: DownloadProgress) -> type[Any]:
    """Makes `snapshot_download(tqdm_class=...)`: it reports to `progress` and draws no bar."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, tqdm

    wanted = not are_progress_bars_disabled()  # HF_HUB_DISABLE_PROGRESS_BARS
    base: Any = tqdm

    class SilentBar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = wanted and options.get("name") == BYTES_BAR
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts_bytes and n:
                progress.advance(n, self.total)

    return SilentBar
