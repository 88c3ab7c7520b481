"""Pieces of the benchmarks' figures."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK = "#1c2126"
COLOURS = ("#3b6fb6", "#d98032", "#4f9d69", "#b65d9e", "#8c7a3f", "#5aa7b8")


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole figure on white; the title is for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:.0f}"'
        f' font-family="system-ui, sans-serif" font-size="13" role="img">'
        f"<title>{escape(title)}</title>"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(
    x: float, y: float, said: str, *, size: int = 13, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}"'
        f' text-anchor="{anchor}" fill="{INK}">{escape(said)}</text>'
    )
