"""A timeline of three decode steps and the gaps between them, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from forerun_bench.svg import COLOURS, document, text
from forerun_bench.timeline import Span, Timeline, exclusive

WIDTH, MARGIN = 960, 24
INNER = WIDTH - 2 * MARGIN
BAND, LOWER = 44, 14  # heights of the lane of a step's kernels and of the lane below
PITCH = 100  # from one lane to the next
MARGIN_US = 60.0  # µs on either side of a gap in the close-up
OTHERS, GAP = "#9aa3ad", "#c8102e"


def draw(timeline: Timeline, title: str) -> str:
    """Three consecutive steps from the middle of `timeline`, and a close-up of both gaps."""
    steps = timeline.steps
    first = max(0, (len(steps) - 3) // 2)
    shown = Timeline(steps[first : first + 3], timeline.between)
    colours = _colours(timeline)
    out = [text(MARGIN, 30, title, size=17, weight="bold")]
    if timeline.host_gap is not None:
        mean = sum(timeline.periods) / len(timeline.periods)
        gap = sum(timeline.gaps) / len(timeline.gaps)
        said = (
            f"step {mean / 1000:.3f} ms, gap between steps {gap:.1f} µs: the GPU is idle"
            f" {timeline.host_gap:.2%} of the time (mean of {len(timeline.gaps)} gaps)"
        )
        out.append(text(MARGIN, 52, said))
    y = 84.0
    if shown.steps:
        begin, end = shown.steps[0][0].start, _end(shown.steps[-1])
        out += _lane(shown, begin, end, y, colours, f"{len(shown.steps)} steps")
    for number, gap in enumerate(shown.gaps, 1):
        y += PITCH
        middle = shown.steps[number][0].start - gap / 2
        half = gap / 2 + MARGIN_US
        said = f"close-up of gap {number}: {gap:.1f} µs"
        out += _lane(shown, middle - half, middle + half, y, colours, said)
    y += PITCH
    out += _legend(timeline, colours, y)
    height = y + 24 * ((len(colours) + 2) // 2) + 8
    return document(WIDTH, height, title, out)


def _lane(
    timeline: Timeline, begin: float, end: float, y: float, colours: dict[str, str], said: str
) -> list[str]:
    """From `begin` to `end` µs: kernels, gaps in red, and below what runs outside the graphs."""
    scale = INNER / (end - begin)

    def bars(spans: Sequence[Span], top: float, height: float, colour: str) -> str:
        d = []
        for span in spans:
            left, right = max(span.start, begin), min(span.end, end)
            if left < right:
                x, width = MARGIN + (left - begin) * scale, (right - left) * scale
                d.append(
                    f"M{x:.2f} {top:g}h{max(width, 0.2):.2f}v{height:g}h-{max(width, 0.2):.2f}z"
                )
        return f'<path fill="{colour}" d="{"".join(d)}"/>' if d else ""

    out = [
        text(MARGIN, y - 8, said),
        text(WIDTH - MARGIN, y - 8, _span(end - begin), anchor="end"),
    ]
    out.append(f'<rect x="{MARGIN}" y="{y:g}" width="{INNER}" height="{BAND}" fill="#eef1f4"/>')
    spans = exclusive(span for step in timeline.steps for span in step)
    for colour in dict.fromkeys((*colours.values(), OTHERS)):
        chosen = [span for span in spans if colours.get(span.name, OTHERS) == colour]
        out.append(bars(chosen, y, BAND, colour))
    out.append(bars(timeline.between, y + BAND + 3, LOWER, OTHERS))
    gaps = [
        Span("", _end(step), gap) for step, gap in zip(timeline.steps, timeline.gaps, strict=False)
    ]
    out.append(bars(gaps, y - 3, BAND + 6, GAP))
    return [line for line in out if line]


def _legend(timeline: Timeline, colours: dict[str, str], y: float) -> list[str]:
    rows = timeline.kernels()
    named = [(colours[r.name], r.name, r.us) for r in rows if r.name in colours]
    rest = sum(row.us for row in rows if row.name not in colours)
    entries = [(colour, f"{_short(name)}, {us:.0f} µs a step") for colour, name, us in named]
    entries.append((OTHERS, f"others, {rest:.0f} µs; below the band: outside the graph"))
    entries.append((GAP, "gap: from the last kernel of a step to the first of the next"))
    out = []
    for index, (colour, said) in enumerate(entries):
        x, at = MARGIN + (index % 2) * INNER / 2, y + 24 * (index // 2)
        out.append(f'<rect x="{x:g}" y="{at - 11:g}" width="13" height="13" fill="{colour}"/>')
        out.append(text(x + 20, at, said))
    return out


def _colours(timeline: Timeline) -> dict[str, str]:
    """The legend of the kernels that take the most time."""
    names = [row.name for row in timeline.kernels()]
    return dict(zip(names, COLOURS, strict=False))


def _short(name: str) -> str:
    """A kernel's name without its template arguments."""
    plain = name.removeprefix("void ").split("<")[0].split("(")[0]
    return plain if len(plain) <= 44 else plain[:43] + "…"


def _span(us: float) -> str:
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.0f} µs"


def _end(step: Sequence[Span]) -> float:
    return max(span.end for span in step)
