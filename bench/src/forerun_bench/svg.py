"""Figures of matplotlib as SVG files."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

WIDTH = 9.6  # inches


def save(figure: Figure, path: Path, title: str) -> None:
    """Writes `figure` with text as text; the same figure gives the same file.

    Args:
        title: for screen readers.
    """
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "forerun"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Title": title})
