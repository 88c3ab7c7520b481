"""Draft trees against a walk by hand."""

from __future__ import annotations

import random

import torch

from forerun.kernels.tree import Tree, move_rows


def random_parents(rng: random.Random, rows: int) -> list[int]:
    return [rng.randrange(i + 1) for i in range(rows - 1)]


def ancestors(parents: list[int], row: int) -> list[int]:
    """From the row up to the root."""
    way = [row]
    while row:
        row = parents[row - 1]
        way.append(row)
    return way


def test_shape_of_random_trees() -> None:
    rng = random.Random(0)
    for rows in (1, 2, 3, 17, 33, 64):
        parents = [random_parents(rng, rows) for _ in range(5)]
        tree = Tree.of(torch.tensor(parents, dtype=torch.int64).view(5, rows - 1))
        for b, own in enumerate(parents):
            for row in range(rows):
                way = ancestors(own, row)
                assert tree.depth[b, row] == len(way) - 1
                bits = int(tree.bits[b, row]) % 2**64
                assert [j for j in range(rows) if bits >> j & 1] == sorted(way)


def test_accepts_the_path_that_was_drawn() -> None:
    rng = random.Random(1)
    longest = 0
    for _ in range(300):
        rows = rng.randint(2, 24)
        parents = random_parents(rng, rows)
        draft = [0] * (rows - 1)
        taken: dict[int, set[int]] = {}
        for i, parent in enumerate(parents):  # siblings hold different tokens
            draft[i] = rng.choice(sorted(set(range(30)) - taken.setdefault(parent, set())))
            taken[parent].add(draft[i])
        drawn = [
            rng.choice([t for i, t in enumerate(draft) if parents[i] == row] or [29])
            if rng.random() < 0.8
            else rng.randrange(30)
            for row in range(rows)
        ]
        path = [0]
        while child := [
            i + 1 for i, p in enumerate(parents) if p == path[-1] and draft[i] == drawn[path[-1]]
        ]:
            path += child
        longest = max(longest, len(path))
        tree = Tree.of(torch.tensor([parents]))
        got, new = tree.accept(torch.tensor([draft]), torch.tensor([drawn]))
        assert new.tolist() == [len(path)]
        assert got[0, : len(path)].tolist() == path
    assert longest > 5


def test_faulty_parents_do_no_harm() -> None:
    tree = Tree.of(torch.tensor([[5, -3, 2]]))
    assert tree.parents.tolist() == [[0, 0, 0, 2]]


def test_moved_rows_are_read_before_any_is_written() -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn):
        data = torch.arange(2 * 3 * 4 * 2).view(2, 3, 4, 2, 1, 1).float().to(dtype)
        before = data.float().flatten(2, 3).clone()
        source, target = torch.tensor([5, 1, 2]), torch.tensor([1, 2, 3])
        move_rows(data, source, target)
        want = before.clone()
        want[:, :, target] = before[:, :, source]
        assert torch.equal(data.float().flatten(2, 3), want)
