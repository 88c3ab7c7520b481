"""A small part of a matrix in which every value, or every pair of values, occurs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(cells: Sequence[Mapping[str, str]], strength: int) -> set[int]:
    """Indices of cells that together have what all cells have.

    `cells`: parameter -> value, the same parameters in every cell. `strength`: 0 takes one cell, 1
    covers every value of a parameter, 2 every pair of values, and so on. Greedy, hence not the
    smallest set; of equally good cells the first, hence the same set in every process.
    """
    missing = [set(combinations(sorted(cell.items()), strength)) for cell in cells]
    chosen: set[int] = set()
    while any(missing):
        best = max(range(len(cells)), key=lambda i: len(missing[i]))
        chosen.add(best)
        found = set(missing[best])
        for combos in missing:
            combos -= found
    return chosen


def axes(values: Mapping[str, Any], parametrized: Iterable[str | Sequence[str]]) -> dict[str, str]:
    """A cell's values: parameters that one `parametrize` gives together are one axis."""
    axis = {}
    for names in parametrized:
        together = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
        axis.update(dict.fromkeys(together, ",".join(together)))
    found: dict[str, str] = {}
    for name, value in values.items():
        at = axis.get(name, name)
        found[at] = found.get(at, "") + repr(value)
    return found


def covering_cells(strength: int, axes: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Cells of the matrix in which any `strength` values occur together; no others exist."""
    cells = list(product(*axes.values()))
    named = [dict(zip(axes, map(repr, cell), strict=True)) for cell in cells]
    chosen = [cells[i] for i in sorted(covering(named, strength))]
    return pytest.mark.parametrize(list(axes), chosen, ids=str)


def some_of(cases: Sequence[Sequence[Any]], *kept: int) -> list[Any]:
    """All cases of a parametrised test; those that are not `kept` are `exhaustive`."""
    return [
        pytest.param(*case, marks=() if i in kept else pytest.mark.exhaustive)
        for i, case in enumerate(cases)
    ]


def share(text: str) -> tuple[int, int]:
    """`2/3` as (2, 3).

    Raises:
        ValueError: it has another form, or there is no such share.
    """
    number, of = (int(word) for word in text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(f"there is no share {text}")
    return number, of


def is_in_share(name: str, number: int, of: int) -> bool:
    """Whether the test of this name is in a share; every process finds the same."""
    return zlib.crc32(name.encode()) % of == number - 1
