"""Draft trees: kernels and twins against a walk by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.kernels.speculation.tree import (
    Tree,
    accept_path_ref,
    move_rows,
    move_rows_ref,
    tree_shape_ref,
)

Shape = Callable[[Tensor], Tree]
Move = Callable[[Tensor, Tensor, Tensor], None]


def twin_of(parents: Tensor) -> Tree:
    return Tree(*tree_shape_ref(parents))


def random_parents(rng: random.Random, rows: int) -> list[int]:
    return [rng.randrange(i + 1) for i in range(rows - 1)]


def ancestors(parents: list[int], row: int) -> list[int]:
    """From the row up to the root."""
    way = [row]
    while row:
        row = parents[row - 1]
        way.append(row)
    return way


@pytest.mark.parametrize("shape", [Tree.of, twin_of])
def test_shape_of_random_trees(shape: Shape, device: torch.device) -> None:
    rng = random.Random(0)
    for rows in (1, 2, 3, 17, 33, 64):
        parents = [random_parents(rng, rows) for _ in range(5)]
        if rows == 64:
            parents[0] = list(range(63))  # a chain
        tree = shape(torch.tensor(parents, dtype=torch.int64, device=device).view(5, rows - 1))
        for b, own in enumerate(parents):
            assert tree.parents[b].tolist() == [0, *own]
            for row in range(rows):
                way = ancestors(own, row)
                assert tree.depth[b, row] == len(way) - 1
                bits = int(tree.bits[b, row]) % 2**64
                assert [j for j in range(rows) if bits >> j & 1] == sorted(way)


def drawn_tree(rng: random.Random, rows: int) -> tuple[list[int], list[int], list[int]]:
    """Parents, drafted tokens (of siblings, different ones), and draws that often agree."""
    parents = random_parents(rng, rows)
    draft = [0] * (rows - 1)
    taken: dict[int, set[int]] = {}
    for i, parent in enumerate(parents):
        draft[i] = rng.choice(sorted(set(range(70)) - taken.setdefault(parent, set())))
        taken[parent].add(draft[i])
    drawn = [
        rng.choice([t for i, t in enumerate(draft) if parents[i] == row] or [69])
        if rng.random() < 0.8
        else rng.randrange(70)
        for row in range(rows)
    ]
    return parents, draft, drawn


@pytest.mark.parametrize("accept", [Tree.accept, accept_path_ref])
def test_accepts_the_path_that_was_drawn(
    accept: Callable[[Tree, Tensor, Tensor], tuple[Tensor, Tensor]], device: torch.device
) -> None:
    rng = random.Random(1)
    longest = 0
    for rows in (1, 2, 3, 9, 24, 64):
        cases = [drawn_tree(rng, rows) for _ in range(20)]
        parents, draft, drawn = (torch.tensor(x, device=device) for x in zip(*cases, strict=True))
        tree = Tree.of(parents.long().view(20, -1))
        got, new = accept(tree, draft.long().view(20, -1), drawn)
        for b, (up, tokens, draws) in enumerate(cases):
            path = [0]
            while child := [
                i + 1 for i, p in enumerate(up) if p == path[-1] and tokens[i] == draws[path[-1]]
            ]:
                path += child
            longest = max(longest, len(path))
            assert new[b] == len(path)
            assert got[b].tolist() == [*path, *range(len(path), rows)]
    assert longest > 5


@pytest.mark.parametrize("shape", [Tree.of, twin_of])
def test_faulty_parents_do_no_harm(shape: Shape, device: torch.device) -> None:
    tree = shape(torch.tensor([[5, -3, 2]], device=device))
    assert tree.parents.tolist() == [[0, 0, 0, 2]]
    assert tree.depth.tolist() == [[0, 1, 1, 2]]


@pytest.mark.parametrize("move", [move_rows, move_rows_ref])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (2, 80)])
def test_moved_rows_are_read_before_any_is_written(
    move: Move, dtype: torch.dtype, heads: int, dim: int, device: torch.device
) -> None:
    shape = (2, 3, 4, 2, heads, dim)
    torch.manual_seed(0)
    data = torch.randn(shape, device=device).to(dtype)
    before = data.float().flatten(2, 3).clone()
    rows = torch.tensor([[1, 2, 3], [6, 5, 4]], device=device)
    path = torch.tensor([[0, 2, 2], [2, 0, 1]], device=device)
    move(data, rows, path)
    want = before.clone()
    want[:, :, [2, 6, 5, 4]] = before[:, :, [3, 4, 6, 5]]
    assert torch.equal(data.float().flatten(2, 3), want)
