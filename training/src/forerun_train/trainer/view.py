"""What a run shows while it goes on, and writes: log lines, TensorBoard, a live view."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forerun.core.errors import ConfigError
from forerun_train.files import write_text
from forerun_train.trainer.options import TrainOptions

LOG = "log.jsonl"
BARS = "▁▂▃▄▅▆▇█"
NOT_SHOWN = ("time", "done", "step")


class Log:
    """`log.jsonl`, one object per line; and what else `options` ask for."""

    def __init__(self, options: TrainOptions, first_rank: bool, resumed_at: int | None) -> None:
        """`resumed_at`: later lines of an earlier process are dropped; None: a new log.

        Raises:
            ConfigError: TensorBoard is asked for and not installed.
        """
        output = Path(options.output)
        self._path, self._first = output / LOG, first_rank
        self._board = _board(output) if first_rank and "tensorboard" in options.logs else None
        live = sys.stdout.isatty() if options.view is None else options.view
        self._view = View(options) if first_rank and live else None
        if first_rank:
            output.mkdir(parents=True, exist_ok=True)
            kept = [] if resumed_at is None else lines_of(self._path)
            kept = [line for line in kept if line.get("step", 0) <= (resumed_at or 0)]
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
            if self._view is not None:
                self._view.start(kept)

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line."""
        if not self._first:
            return
        line = {**line, "time": round(time.time(), 1)}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._board is not None:
            for name, value in line.items():
                if isinstance(value, int | float) and name not in NOT_SHOWN:
                    self._board.add_scalar(name, value, line["step"])
        if self._view is not None:
            self._view.show(line)
        else:
            shown = {k: v for k, v in line.items() if k != "time"}
            print("  ".join(f"{k} {short(v)}" for k, v in shown.items()), flush=True)

    def close(self) -> None:
        """Ends the live view."""
        if self._board is not None:
            self._board.close()
        if self._view is not None:
            self._view.stop()


def _board(output: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "logs tensorboard needs the package; run: pip install tensorboard."
        ) from None
    return SummaryWriter(str(output / "tensorboard"))


class View:
    """A table of the newest figures with small curves, in place."""

    def __init__(self, options: TrainOptions) -> None:
        self._title = f"{options.kind} for {Path(options.target).name} -> {options.output}"
        self._live = Live(refresh_per_second=4)
        self._history: dict[str, list[float]] = {}
        self._newest: dict[str, Any] = {}

    def start(self, lines: list[dict[str, Any]]) -> None:
        """Begins with the lines of an earlier process."""
        for line in lines:
            self._add(line)
        self._live.start()

    def show(self, line: dict[str, Any]) -> None:
        """Shows a line."""
        self._add(line)
        self._live.update(self.render())

    def stop(self) -> None:
        """Leaves the last table on the terminal."""
        self._live.stop()

    def render(self) -> Group:
        """The whole view."""
        table = Table.grid(padding=(0, 2))
        for name, value in self._newest.items():
            if name not in NOT_SHOWN:
                curve = sparkline(self._history.get(name, []))
                table.add_row(name.replace("_", " "), short(value), Text(curve, style="cyan"))
        done = float(self._newest.get("done", 0.0))
        head = Text(f"{self._title}   step {self._newest.get('step', 0)}", style="bold")
        return Group(head, ProgressBar(total=1.0, completed=done, width=60), table)

    def _add(self, line: dict[str, Any]) -> None:
        self._newest |= line
        for name, value in line.items():
            if isinstance(value, int | float):
                self._history.setdefault(name, []).append(float(value))


def sparkline(values: list[float], width: int = 32) -> str:
    """The last values as bars, the least the lowest; nothing for fewer than two."""
    values = values[-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if len(values) < 2 or high <= low:
        return ""
    return "".join(BARS[int((v - low) / (high - low) * (len(BARS) - 1))] for v in values)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that a killed process left half is dropped."""
    if not path.exists():
        return []
    out = []
    for text in path.read_text().splitlines():
        try:
            out.append(json.loads(text))
        except ValueError:
            continue
    return out


def short(value: Any) -> str:
    """A figure in a few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(short(each) for each in value)
    return str(value)
