"""The part of a matrix that `make test` runs."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import axes, covering, is_in_share, share


@pytest.mark.parametrize(
    ("sizes", "strength", "most"),
    [
        ((3, 3, 2, 2, 2), 0, 1),
        ((3, 3, 2, 2, 2), 1, 3),
        ((3, 3, 2, 2, 2), 2, 12),
        ((5, 9), 1, 9),
        ((5, 9), 2, 45),
    ],
)
def test_every_combination_occurs_in_a_small_part(
    sizes: tuple[int, ...], strength: int, most: int
) -> None:
    values = product(*(map(str, range(size)) for size in sizes))
    cells = [dict(zip("abcde", cell, strict=False)) for cell in values]
    chosen = covering(cells, strength)
    assert len(chosen) <= most
    for names in combinations("abcde"[: len(sizes)], strength):
        wanted = {tuple(cell[name] for name in names) for cell in cells}
        assert {tuple(cells[i][name] for name in names) for i in chosen} == wanted


def test_parameters_that_go_together_are_no_product() -> None:
    """`parametrize(("a", "b"), [...])`: only pairs that occur in some cell are asked for."""
    cells = [{"a": i, "b": i, "c": j} for i in "0123" for j in "01"]
    assert len(covering(cells, 2)) == 8
    assert len(covering(cells, 1)) == 4


def test_what_is_given_together_is_one_axis() -> None:
    """All cases of a list stay, and of a product every value."""
    cases, sizes = [("a", 1), ("a", 2), ("b", 1), ("b", 2)], range(3)
    cells = [axes({"x": x, "y": y, "n": n}, ["x, y", ["n"]]) for x, y in cases for n in sizes]
    assert set(cells[0]) == {"x,y", "n"}
    assert axes({"way": 1}, []) == {"way": "1"}  # of a fixture
    assert len(covering(cells, 1)) == len(cases)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("letter", "abcd")
def test_without_a_mark_a_matrix_covers_1(
    letter: str, number: int, request: pytest.FixtureRequest
) -> None:
    marked = request.node.get_closest_marker("exhaustive") is not None
    assert marked == ("abcd".index(letter) != number)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3"])
def test_a_share_that_does_not_exist(text: str) -> None:
    with pytest.raises(ValueError):
        share(text)


def test_a_name_is_in_one_share() -> None:
    names = [f"tests/test_it.py::test_it[{i}]" for i in range(300)]
    shares = [{name for name in names if is_in_share(name, i, 3)} for i in (1, 2, 3)]
    assert set.union(*shares) == set(names)
    assert sum(map(len, shares)) == len(names)
    assert min(map(len, shares)) > 70
    assert share("2/3") == (2, 3)
