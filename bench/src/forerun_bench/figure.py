"""A timeline of three decode steps and the gaps between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from forerun.executor.profiling.timeline import Span, Timeline, exclusive
from forerun_bench.svg import WIDTH

KERNELS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:olive", "tab:cyan")
BAND, OTHERS, GAP = "#eef1f4", "tab:gray", "tab:red"
MARGIN_US = 60.0  # µs on either side of a gap in the close-up

View = tuple[str, float, float]  # a lane's title, and where it begins and ends in µs


def draw(timeline: Timeline, title: str) -> Figure:
    """Three consecutive steps from the middle of `timeline`, and a close-up of both gaps."""
    first = max(0, (len(timeline.steps) - 3) // 2)
    shown = Timeline(timeline.steps[first : first + 3], timeline.between)
    colours = dict(zip((row.name for row in timeline.kernels()), KERNELS, strict=False))
    return compose(title, _lanes(shown, _summary(timeline)), colours, _legend(timeline, colours))


def compose(
    title: str,
    lanes: Iterable[tuple[View, Timeline]],
    colours: Mapping[str, str],
    legend: Mapping[str, str],
) -> Figure:
    """Returns the figure of one or more lanes, each with what runs in it.

    Args:
        colours: of kernels, by name; others are grey.
        legend: what to say of each colour.
    """
    lanes = list(lanes)
    figure = Figure(figsize=(WIDTH, 1.9 + len(lanes)), layout="constrained")
    figure.suptitle(title, fontweight="bold")
    for axes, lane in zip(figure.subplots(len(lanes), squeeze=False).flat, lanes, strict=True):
        _draw_lane(axes, *lane, colours)
    figure.legend(
        handles=[Patch(color=colour, label=said) for colour, said in legend.items()],
        loc="outside lower left", ncols=2, frameon=False, fontsize="small",
    )  # fmt: skip
    return figure


def _lanes(shown: Timeline, summary: str) -> list[tuple[View, Timeline]]:
    if not shown.steps:
        return [((summary, 0.0, 1.0), shown)]
    views = [(summary, shown.steps[0][0].start, max(span.end for span in shown.steps[-1]))]
    for number, gap in enumerate(_gaps(shown), 1):
        said = f"close-up of gap {number}: {gap.duration:.1f} µs"
        views.append((said, gap.start - MARGIN_US, gap.end + MARGIN_US))
    return [(view, shown) for view in views]


def _draw_lane(axes: Axes, view: View, timeline: Timeline, colours: Mapping[str, str]) -> None:
    """Kernels, gaps in red, and below what runs outside the graphs."""
    title, begin, end = view

    def bars(spans: Iterable[Span], bottom: float, height: float, colour: str) -> None:
        seen = [s for s in spans if s.duration > 0 and s.end > begin and s.start < end]
        ranges = [((s.start - begin) / 1e6, s.duration / 1e6) for s in seen]
        axes.broken_barh(ranges, (bottom, height), color=colour, linewidth=0)

    axes.set_title(title, loc="left", fontsize="medium")
    axes.axhspan(0, 1, color=BAND, linewidth=0)
    spans = exclusive(span for step in timeline.steps for span in step)
    for colour in (*colours.values(), OTHERS):
        bars((s for s in spans if colours.get(s.name, OTHERS) == colour), 0, 1, colour)
    bars(timeline.between, -0.4, 0.3, OTHERS)
    bars(_gaps(timeline), -0.07, 1.14, GAP)
    axes.set(xlim=(0, (end - begin) / 1e6), ylim=(-0.42, 1.08), yticks=[])
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.spines[:].set_visible(False)


def _gaps(timeline: Timeline) -> list[Span]:
    starts = [step[0].start for step in timeline.steps[1:]]
    return [Span("", at - gap, gap) for at, gap in zip(starts, timeline.gaps, strict=True)]


def _summary(timeline: Timeline) -> str:
    if timeline.host_gap is None:
        return f"{len(timeline.steps)} steps"
    mean = sum(timeline.periods) / len(timeline.periods)
    gap = sum(timeline.gaps) / len(timeline.gaps)
    return (
        f"step {mean / 1000:.3f} ms, gap between steps {gap:.1f} µs: the GPU is idle"
        f" {timeline.host_gap:.2%} of the time (mean of {len(timeline.gaps)} gaps)"
    )


def _legend(timeline: Timeline, colours: Mapping[str, str]) -> dict[str, str]:
    rows = timeline.kernels()
    legend = {
        colours[row.name]: f"{_short(row.name)}, {row.us:.0f} µs a step"
        for row in rows
        if row.name in colours
    }
    rest = sum(row.us for row in rows if row.name not in colours)
    legend[OTHERS] = f"others, {rest:.0f} µs; below the band: outside the graph"
    legend[GAP] = "gap: from the last kernel of a step to the first of the next"
    return legend


def _short(name: str) -> str:
    """A kernel's name without its template arguments."""
    plain = name.removeprefix("void ").split("<")[0].split("(")[0]
    return plain if len(plain) <= 44 else plain[:43] + "…"
