"""What a run shows and writes while it goes on: log lines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

LOG = "log.jsonl"


class Log:
    """`log.jsonl`, one object per line; and short lines on the terminal."""

    def __init__(self, output: Path, first_rank: bool, resumed_at: int | None) -> None:
        """`resumed_at`: later lines of an earlier process are dropped; None: a new log."""
        self._path, self._first = output / LOG, first_rank
        if first_rank:
            output.mkdir(parents=True, exist_ok=True)
            kept = [] if resumed_at is None else lines_of(self._path)
            kept = [line for line in kept if line.get("step", 0) <= (resumed_at or 0)]
            self._path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line."""
        if not self._first:
            return
        line = {**line, "time": round(time.time(), 1)}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {k: v for k, v in line.items() if k != "time"}
        print("  ".join(f"{k} {_short(v)}" for k, v in shown.items()), flush=True)


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


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + " ".join(_short(each) for each in value) + "]"
    return str(value)
