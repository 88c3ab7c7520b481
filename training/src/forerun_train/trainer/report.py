"""The report of a run: one HTML file with its curves and settings, which needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun_train.files import write_text
from forerun_train.trainer.view import LOG, lines_of, short

REPORT = "report.html"
# Title -> the figures of its plot.
PLOTS: Mapping[str, tuple[str, ...]] = {
    "Loss": ("loss", "validation_loss"),
    "Tokens per step": ("block_accept_length", "accept_length"),
    "Learning rate": ("learning_rate",),
    "Gradient norm": ("gradient_norm",),
    "Tokens per second": ("tokens_per_second",),
    "Share of the GPU's peak (MFU)": ("mfu",),
}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;"
    "text-align:left}figure{display:inline-block;margin:.5em}img{width:30em;max-width:100%}"
)


def write_report(output: Path, settings: Mapping[str, Any]) -> Path | None:
    """Writes `report.html` from the log; without matplotlib there are no curves in it.

    Returns its path; None: there is no log.
    """
    lines = lines_of(output / LOG)
    if not lines:
        return None
    scored = [line for line in lines if "accept_length" in line]
    body = [
        f"<h1>{html.escape(str(settings['kind']))} draft for"
        f" {html.escape(Path(str(settings['target'])).name)}</h1>",
        _scores(scored),
        *(_figure(title, _curves(lines, names)) for title, names in PLOTS.items()),
        "<h2>Settings</h2>",
        _table(["setting", "value"], [[name, short(v)] for name, v in settings.items()]),
    ]
    page = f"<!doctype html><meta charset=utf-8><title>Training</title><style>{STYLE}</style>"
    path = output / REPORT
    write_text(path, page + "\n".join(body) + "\n")
    return path


def _scores(scored: Sequence[Mapping[str, Any]]) -> str:
    """The best validation and the last one."""
    if not scored:
        return "<p>Not validated yet.</p>"
    best = max(scored, key=lambda line: float(line["accept_length"]))
    rows = []
    for name, line in (("best, exported", best), ("last", scored[-1])):
        by_position = " ".join(f"{share:.3f}" for share in line["accepted_by_position"])
        values = short(line["accept_length"]), short(line["validation_loss"]), by_position
        rows.append([name, str(line["step"]), *values])
    head = ["validation", "step", "tokens per step", "loss", "steps that accept draft 1, 2, ..."]
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(each)}</{tag}>" for each in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(each, "td") for each in rows) + "</table>"


Curve = tuple[str, list[int], list[float]]  # name, steps, values


def _curves(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Curve]:
    out = []
    for name in names:
        points = [(int(line["step"]), float(line[name])) for line in lines if line.get(name)]
        if len(points) > 1:
            steps, values = zip(*points, strict=True)
            out.append((name.replace("_", " "), list(steps), list(values)))
    return out


def _figure(title: str, curves: Sequence[Curve]) -> str:
    """A plot as an image in the page; nothing without curves or matplotlib."""
    if not curves:
        return ""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, steps, values in curves:
        axes.plot(steps, values, label=name, marker="o" if len(steps) < 30 else None, markersize=3)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    data = base64.b64encode(image.getvalue()).decode()
    return f'<figure><img alt="{html.escape(title)}" src="data:image/png;base64,{data}"></figure>'
