"""Splits a recorded trace by stage, compresses it, and writes a table of each part.

`recorder.py` runs this file in a process of its own: a trace may have hundreds of megabytes.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from forerun.core.profile import DECODE_STEP, STAGES, ProfileParams
from forerun.executor.profiling.table import kernel_table
from forerun.executor.profiling.timeline import (
    LAUNCHES,
    ON_DEVICE,
    Event,
    Timeline,
    marks,
    operators,
    within,
)
from forerun.platform.limited_process import serve

RAW = "raw.json"  # in the folder of a task: what the profiler has written
MAX_RAW_BYTES = 1 << 30  # of a trace before it is compressed
MEMORY = 32 << 30  # bytes of address space
_WORK: list[Path] = []  # the folder of the task that runs
ALL = tuple(name for names in STAGES.values() for name in names)


def answer(message: bytes) -> bytes:
    """Writes the files of a task of `recorder.py`; returns why it could not, or nothing."""
    task = json.loads(message)
    work, stem = Path(task["work"]), Path(task["stem"])
    _WORK.append(work)
    try:
        size = (work / RAW).stat().st_size
        if size > MAX_RAW_BYTES:
            return (
                f"it has {size >> 20} MB and may have {MAX_RAW_BYTES >> 20}; record fewer steps, or"
                " fewer activities"
            ).encode()
        _report(work / stem.name, task["device"], ProfileParams(**task["params"]))
        (work / RAW).unlink()
        for path in work.iterdir():
            path.replace(stem.with_name(path.name))
    except (OSError, ValueError, MemoryError) as error:
        return f"{type(error).__name__}: {error}".encode()
    finally:
        clear()
    return b""


def clear() -> None:
    """Removes what is not complete."""
    while _WORK:
        shutil.rmtree(_WORK.pop(), ignore_errors=True)


def _report(stem: Path, device: str, params: ProfileParams) -> None:
    # With stacks, PyTorch may write names of code that is no longer there: any bytes.
    text = stem.with_name(RAW).read_text(encoding="utf-8", errors="replace")
    trace = json.loads(text, strict=False)
    events = trace["traceEvents"]
    if not params.by_stage:
        with gzip.open(_trace_path(stem), "wt", 6, encoding="utf-8") as out:
            out.write(text)
        _write_table(stem, events, ALL, device)
        return
    for stage, names in STAGES.items():
        steps = marks(events, names)[: params.num_steps]
        if steps:
            part = stem.with_name(f"{stem.name}-{stage}")
            chosen = list(_events_of(events, steps))
            with gzip.open(_trace_path(part), "wt", 6, encoding="utf-8") as out:
                json.dump({**trace, "traceEvents": chosen}, out)
            _write_table(part, chosen, names, device)


def _trace_path(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.trace.json.gz")


def _events_of(
    events: Sequence[Event], steps: Sequence[tuple[float, float]]
) -> Iterator[dict[str, Any]]:
    """What the host did in these steps, and what the device did for that."""
    inside = within(steps)
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in LAUNCHES and inside(event["ts"])
    }
    for event in events:
        if event.get("ph") == "M":
            yield dict(event)
        elif event.get("cat") in ON_DEVICE:
            if event["args"]["correlation"] in launched:
                yield dict(event)
        elif event.get("cat") == "ac2g":  # arrows from launches to kernels
            if event["id"] in launched:
                yield dict(event)
        elif "ts" in event and inside(event["ts"]):
            yield dict(event)


def _write_table(stem: Path, events: Sequence[Event], names: Collection[str], device: str) -> None:
    """The kernels of the steps; on a CPU the operators."""
    steps = marks(events, names)
    timeline = Timeline.of(events, names)
    rows = timeline.kernels() or operators(events, steps)
    kinds = [f"{len(found)} × {name}" for name in names if (found := marks(events, (name,)))]
    title = ", ".join([*(kinds or ["no steps"]), device])
    if timeline.host_gap is not None and set(names) == {DECODE_STEP}:
        title += f", host gap {timeline.host_gap:.2%}"
    path = stem.with_name(f"{stem.name}.kernels.md")
    path.write_text(kernel_table(rows, title), encoding="utf-8")


if __name__ == "__main__":
    serve(answer, MEMORY, clear)
