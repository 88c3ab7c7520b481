"""What a process holds: memory, files, threads. Linux."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """Resources of a process."""

    rss: float  # MiB
    files: int
    threads: int


def held(pid: int) -> Held:
    status = (Path("/proc") / str(pid) / "status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return Held(
        rss=int(fields["VmRSS"].split()[0]) / 1024,
        files=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(fields["Threads"]),
    )


def slope(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y)."""
    count = len(points)
    mean_x, mean_y = (sum(p[i] for p in points) / count for i in (0, 1))
    square = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / square if square else 0.0
