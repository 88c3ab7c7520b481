# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sums whose order does not depend on how a tile is laid out among threads.

`tl.sum` adds what a thread has first, then across threads: another tile shape, number of warps or
alignment of a pointer adds in another order, and rounds otherwise.
"""

from __future__ import annotations

from forerun.kernels.runtime.jit import jit, tl


@jit
def sum_pairs(x, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    """[A, B, N] -> [A, B], N a power of two: neighbours are added, then the neighbouring sums."""
    for level in tl.static_range(31):
        if (N >> level) > 1:
            x = tl.sum(tl.reshape(x, (A, B, N >> (level + 1), 2)), 3)
    return tl.reshape(x, (A, B))
