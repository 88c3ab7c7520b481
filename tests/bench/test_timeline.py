"""A trace cut into steps: whose kernel is whose, where the gaps are, and the figure of it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color

from forerun.core.profile import DECODE_STEP as STEP
from forerun.executor.profiling.table import kernel_table, shorten
from forerun.executor.profiling.timeline import (
    OUTSIDE,
    KernelRow,
    Span,
    Timeline,
    exclusive,
    marks,
    operators,
)
from forerun_bench.figure import GAP, KERNELS, OTHERS, draw
from forerun_bench.svg import save

Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> Event:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def graph_step(number: int, host: float, device: float) -> list[Event]:
    """A graph of two kernels of 40 µs with 5 µs between them, and a copy of its result after."""
    graph, copy = 2 * number, 2 * number + 1
    return [
        event("user_annotation", STEP, host, 50),
        event("cuda_runtime", "cudaGraphLaunch", host + 5, 10, graph),
        event("cuda_runtime", "cudaMemcpyAsync", host + 20, 2, copy),
        # Not in order: traces are not sorted.
        event("kernel", "second", device + 45, 40, graph),
        event("kernel", "first", device, 40, graph),
        event("gpu_memcpy", "Memcpy DtoH", device + 86, 2, copy),
    ]


TRACE = [
    {"ph": "M", "name": "process_name"},
    *graph_step(1, 0, 100),
    *graph_step(2, 60, 195),  # 10 µs after the end of the first
    *graph_step(3, 160, 300),  # 20 µs after the second
    event("user_annotation", "something else", 0, 1000),
]


def test_gaps_lie_between_graphs() -> None:
    timeline = Timeline.of(TRACE)
    assert [[span.name for span in step] for step in timeline.steps] == [["first", "second"]] * 3
    assert timeline.gaps == [10, 20]  # the copies that run in them do not shorten them
    assert timeline.periods == [95, 105]
    assert timeline.host_gap == pytest.approx(30 / 200)
    assert [span.name for span in timeline.between] == ["Memcpy DtoH"] * 3


def test_without_graphs_a_step_consists_of_its_launches() -> None:
    eager = [
        {**e, "name": "cudaLaunchKernel"} if e["name"] == "cudaGraphLaunch" else e for e in TRACE
    ]
    timeline = Timeline.of(eager)
    assert [span.name for span in timeline.steps[0]] == ["first", "second", "Memcpy DtoH"]
    assert timeline.gaps == [7, 17]
    assert timeline.between == ()


def test_steps_that_overlap_on_the_device_have_no_gap() -> None:
    early = [Span("a", 0, 10)], [Span("b", 8, 10)]  # launched while its predecessor runs out
    assert Timeline(tuple(map(tuple, early))).gaps == [0]


def test_too_few_steps_have_no_gaps() -> None:
    assert Timeline.of([]).host_gap is None
    one = Timeline.of(graph_step(1, 0, 100))
    assert (one.host_gap, one.gaps, one.periods) == (None, [], [])
    draw(one, "one step")
    draw(Timeline(()), "nothing")


def test_kernels_per_step_by_time() -> None:
    rows = Timeline.of(TRACE).kernels()
    assert rows == [
        KernelRow("first", 1, 40, 40),
        KernelRow("second", 1, 40, 40),
        KernelRow("Memcpy DtoH", 1, 2, 2),
    ]
    table = kernel_table(rows, "title")
    assert "| `first` | 1.0 | 40.0 | 40.0 |" in table.splitlines()
    assert "| all | 3.0 | 82.0 | |" in table.splitlines()


def test_time_of_overlapping_kernels_adds_up() -> None:
    """Launched early, a kernel waits for its predecessor: that time is the predecessor's."""
    spans = (Span("a", 0, 10), Span("b", 4, 10), Span("c", 5, 2), Span("a", 30, 10))
    assert exclusive(spans) == [
        Span("a", 0, 10),
        Span("b", 10, 4),
        Span("c", 7, 0),
        Span("a", 30, 10),
    ]
    rows = Timeline((spans,)).kernels()
    assert rows == [
        KernelRow("a", 2, 20, 20),
        KernelRow("b", 1, 4, 10),
        KernelRow("c", 1, 0, 2),
    ]


def test_kernel_names_fit_a_table() -> None:
    assert "|" not in shorten("void f<a || b>(int)")
    assert len(shorten("x" * 300)) == 90


def bars(axes: Axes, colour: str) -> list[tuple[float, float]]:
    """From where to where bars of this colour go, in µs, as far as the axes show them."""
    left, right = axes.get_xlim()
    boxes = [
        path.get_extents()
        for collection in axes.collections
        for path in collection.get_paths()
        if same_color(collection.get_facecolor()[0], colour)
    ]
    return [(1e6 * max(left, box.x0), 1e6 * min(right, box.x1)) for box in boxes]


def test_figure_marks_every_gap_to_scale() -> None:
    whole, first, second = draw(Timeline.of(TRACE), "title").axes
    near = partial(pytest.approx, abs=1e-6)
    assert whole.get_xlim() == pytest.approx((0, 285e-6))
    assert np.array(bars(whole, GAP)) == near(np.array([(85, 95), (180, 200)]))
    assert np.array(bars(first, GAP)) == near(np.array([(60, 70)]))
    assert np.array(bars(second, GAP)) == near(np.array([(60, 80)]))
    assert second.get_xlim() == pytest.approx((0, 140e-6))
    firsts = [(0, 40), (95, 135), (200, 240)]
    assert np.array(bars(whole, KERNELS[0])) == near(np.array(firsts))
    copies = [(86, 88), (181, 183)]  # the third follows the last step
    assert np.array(bars(whole, OTHERS)) == near(np.array(copies))


def test_figure_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    save(draw(Timeline.of(TRACE), "a < b & c"), path, "d < e")
    said = " ".join(ET.fromstring(path.read_text(encoding="utf-8")).itertext())
    assert "a < b & c" in said and "d < e" in said
    assert "close-up of gap 2: 20.0 µs" in said
    assert "15.00%" in said
    assert "first, 40 µs a step" in said
    again = tmp_path / "y.svg"
    save(draw(Timeline.of(TRACE), "a < b & c"), again, "d < e")
    assert again.read_bytes() == path.read_bytes()


def operator(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return {**event("cpu_op", name, ts, dur), "tid": tid}


def test_operators_count_without_those_that_they_call() -> None:
    trace = [
        event("user_annotation", STEP, 0, 100),
        operator("inner", 12, 5),
        operator("outer", 10, 20),
        operator("inner", 20, 10),
        operator("outer", 15, 8, tid=2),  # another thread, at the same time
        event("user_annotation", STEP, 200, 100),
        operator("inner", 250, 1),
        operator("between", 150, 10),
        event("user_annotation", "prefill step", 400, 50),
        operator("prefill", 410, 10),
    ]
    rows = operators(trace, marks(trace, (STEP,)))
    assert rows == [
        KernelRow(OUTSIDE, 1.0, (200 - 29) / 2, (200 - 29) / 2),
        KernelRow("inner", 1.5, 8.0, 8.0),
        KernelRow("outer", 1.0, 6.5, 14.0),
    ]
    assert operators(trace, []) == []
