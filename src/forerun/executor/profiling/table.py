"""The table of a profile: time by kernel."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.executor.profiling.timeline import KernelRow


def kernel_table(rows: Sequence[KernelRow], title: str) -> str:
    """Markdown. µs: exclusive time, which adds up; then from start to end."""
    lines = [f"{title}; per step", "", "| kernel | launches | µs | start to end |"]
    lines.append("|---|---:|---:|---:|")
    lines += [
        f"| `{shorten(r.name)}` | {r.count:.1f} | {r.us:.1f} | {r.span_us:.1f} |" for r in rows
    ]
    total, launches = sum(row.us for row in rows), sum(row.count for row in rows)
    lines.append(f"| all | {launches:.1f} | {total:.1f} | |")
    return "\n".join(lines) + "\n"


def shorten(name: str, width: int = 90) -> str:
    """A kernel's name without characters that break a table, cut at `width`."""
    clean = name.replace("|", "/").replace("void ", "").replace("(anonymous namespace)::", "")
    return clean if len(clean) <= width else clean[: width - 1] + "…"
