"""Latency CDFs of the runs of a benchmark, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from forerun_bench.serving.metrics import Run
from forerun_bench.svg import COLOURS, INK, document, text

WIDTH, MARGIN, TOP = 960, 24, 64
PANEL_WIDTH, PANEL_HEIGHT = 380, 190  # of the axes
STEP_X, STEP_Y = 470, 260  # from one panel to the next
LEFT: Final = MARGIN + 44  # room for the numbers of the first axis
PANELS: Final = {
    "ttft": "TTFT, ms",
    "itl": "ITL per token, ms",
    "chunk_itl": "gap between chunks, ms",
    "e2e": "end to end, ms",
}
POINTS: Final = 100  # of a curve
RIGHTMOST: Final = 0.995  # axes end at the largest of the runs' quantiles here


def draw(runs: Sequence[Run], title: str) -> str:
    """A panel for each latency, with a curve for each run."""
    out = [text(MARGIN, 30, title, size=17, weight="bold")]
    for index, (name, label) in enumerate(PANELS.items()):
        x, y = LEFT + STEP_X * (index % 2), TOP + STEP_Y * (index // 2)
        out += _panel([run.values(name) for run in runs], x, y, label)
    y = TOP + 2 * STEP_Y
    for index, run in enumerate(runs):
        x = LEFT + index % 4 * 220
        at = y + 22 * (index // 4)
        colour = COLOURS[index % len(COLOURS)]
        out.append(f'<rect x="{x:g}" y="{at - 11:g}" width="13" height="13" fill="{colour}"/>')
        out.append(text(x + 20, at, rate_label(run)))
    return document(WIDTH, y + 22 * -(-len(runs) // 4), title, out)


def rate_label(run: Run) -> str:
    return "all at once" if math.isinf(run.request_rate) else f"{run.request_rate:.3g} requests/s"


def _panel(curves: Sequence[Sequence[float]], x: float, y: float, label: str) -> list[str]:
    """Axes with the fraction of the values at or below x; the axis begins at 0."""
    ranked = [sorted(1000 * value for value in values) for values in curves]
    end = max((_at(values, RIGHTMOST) for values in ranked if values), default=0.0)
    out = [
        text(x, y - 8, label, weight="bold"),
        f'<rect x="{x:g}" y="{y:g}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="#eef1f4"/>',
    ]
    if not end > 0:
        return [*out, text(x + 12, y + 24, "not known")]
    for fraction in (0.0, 0.5, 0.9, 1.0):
        level = y + PANEL_HEIGHT * (1 - fraction)
        out.append(_line([(x, level), (x + PANEL_WIDTH, level)], "#ffffff", 1))
        out.append(text(x - 6, level + 4, f"{fraction:g}", size=11, anchor="end"))
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = x + PANEL_WIDTH * part
        out.append(_line([(at, y + PANEL_HEIGHT), (at, y + PANEL_HEIGHT + 4)], INK, 1))
        out.append(text(at, y + PANEL_HEIGHT + 18, f"{end * part:.3g}", size=11, anchor="middle"))
    for index, values in enumerate(ranked):
        if values:
            points = [
                (x + PANEL_WIDTH * min(1.0, value / end), y + PANEL_HEIGHT * (1 - fraction))
                for value, fraction in _cdf(values)
            ]
            out.append(_line(points, COLOURS[index % len(COLOURS)], 2))
    return out


def _cdf(ranked: Sequence[float]) -> list[tuple[float, float]]:
    """(value, fraction of the values at or below it), at most `POINTS` + 1 of them."""
    count = min(POINTS, len(ranked))
    places = [math.ceil(len(ranked) * i / count) for i in range(1, count + 1)]
    return [(ranked[0], 0.0), *((ranked[n - 1], n / len(ranked)) for n in places)]


def _at(ranked: Sequence[float], fraction: float) -> float:
    return ranked[max(0, math.ceil(fraction * len(ranked)) - 1)]


def _line(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'
