"""Latency CDFs of the runs of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from forerun_bench.serving.metrics import Run
from forerun_bench.svg import WIDTH

PANELS: Final = {
    "ttft": "TTFT, ms",
    "itl": "ITL per token, ms",
    "chunk_itl": "gap between chunks, ms",
    "e2e": "end to end, ms",
}
RIGHTMOST: Final = 0.995  # axes end at the largest of the runs' quantiles here


def draw(runs: Sequence[Run], title: str) -> Figure:
    """A panel for each latency, with a curve for each run."""
    figure = Figure(figsize=(WIDTH, 6.4), layout="constrained")
    figure.suptitle(title, fontweight="bold")
    figure.supylabel("fraction of values at or below")
    panels = zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True)
    for axes, (name, label) in panels:
        axes.set_title(label)
        _draw_panel(axes, [1000 * np.array(run.values(name)) for run in runs])
    figure.legend(
        handles=[Line2D([], [], color=f"C{i}", label=r.rate_label) for i, r in enumerate(runs)],
        loc="outside lower left", ncols=4, frameon=False,
    )  # fmt: skip
    return figure


def _draw_panel(axes: Axes, curves: Sequence[NDArray[np.float64]]) -> None:
    """`curves`: values in ms, empty where they are not known; the axis begins at 0."""
    ends = [np.quantile(c, RIGHTMOST, method="inverted_cdf") for c in curves if c.size]
    if not max(ends, default=0) > 0:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not known", horizontalalignment="center")
        return
    for index, values in enumerate(curves):
        if values.size:
            axes.ecdf(values, color=f"C{index}")
    axes.set(xlim=(0, max(ends)), ylim=(0, 1), yticks=(0, 0.5, 0.9, 1))
    axes.grid(alpha=0.3)
