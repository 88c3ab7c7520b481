"""Profiles decode steps of an engine on a GPU."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from forerun import SamplingParams
from forerun.core.profile import DECODE_STEP
from forerun.core.request import State
from forerun.engine.engine import Engine
from forerun.executor.profiling.table import kernel_table
from forerun.executor.profiling.timeline import Timeline
from forerun_bench.figure import draw
from forerun_bench.svg import save

WARM, STEPS = 3, 8  # steps before, and steps recorded


def profile_steps(
    engine: Engine, prompts: Sequence[Sequence[int]], output_len: int, trace: Path | None = None
) -> Timeline:
    """Decode steps of one batch, during which none of its requests ends.

    Args:
        trace: where to write the Chrome trace (`.json.gz`); None: nowhere.
    """
    with TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json.gz"
        _record(engine, prompts, output_len, path)
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return Timeline.of(json.load(file)["traceEvents"])


def _record(engine: Engine, prompts: Sequence[Sequence[int]], output_len: int, path: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    params = SamplingParams(temperature=0.0, max_new_tokens=output_len, ignore_eos=True)
    engine.flush_cache()
    requests = [engine.make_request(list(ids), params) for ids in prompts]

    def steady() -> bool:
        return all(r.state is not State.FINISHED for r in requests)

    for request in requests:
        engine.submit(request)
    while not all(r.output for r in requests):
        engine.step()
    for _ in range(WARM):
        engine.step()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(STEPS):
            if steady():
                with torch.profiler.record_function(DECODE_STEP):
                    engine.step()
        torch.cuda.synchronize(engine.info.explain["device"])
    profiler.export_chrome_trace(str(path))
    for request in requests:
        engine.abort(request.rid)
    while engine.has_work:
        engine.step()
    for request in requests:
        engine.close_request(request)


def keep(timeline: Timeline, folder: Path, name: str, title: str) -> list[Path]:
    """Writes the figure and the kernel table of a profile; returns their paths."""
    figure, kernels = folder / f"{name}.svg", folder / f"{name}.kernels.md"
    save(draw(timeline, title), figure, title)
    kernels.write_text(kernel_table(timeline.kernels(), title), encoding="utf-8")
    return [figure, kernels]
