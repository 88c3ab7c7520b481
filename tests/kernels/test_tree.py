"""Draft trees: kernels and references against a walk by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.kernels.speculation.tree import (
    Tree,
    accept_path_ref,
    compact_kv,
    compact_kv_ref,
    tree_shape_ref,
)

Shape = Callable[[Tensor], Tree]
Compact = Callable[[Tensor, Tensor, Tensor], None]


def tree_ref(parents: Tensor) -> Tree:
    return Tree(*tree_shape_ref(parents))


def random_parents(rng: random.Random, nodes: int) -> list[int]:
    return [rng.randrange(i + 1) for i in range(nodes - 1)]


def path_to_root(parents: list[int], node: int) -> list[int]:
    """From the node up to the root."""
    path = [node]
    while node:
        node = parents[node - 1]
        path.append(node)
    return path


@pytest.mark.parametrize("shape", [Tree.from_parents, tree_ref])
def test_shape_of_random_trees(shape: Shape, device: torch.device) -> None:
    rng = random.Random(0)
    for nodes in (1, 2, 3, 17, 33, 64, 65, 128, 256):
        parents = [random_parents(rng, nodes) for _ in range(5)]
        if nodes >= 64:
            parents[0] = list(range(nodes - 1))  # a chain
        tree = shape(torch.tensor(parents, dtype=torch.int64, device=device).view(5, nodes - 1))
        for b, own in enumerate(parents):
            assert tree.parents[b].tolist() == [0, *own]
            for node in range(nodes):
                path = path_to_root(own, node)
                assert tree.depth[b, node] == len(path) - 1
                words = [int(word) % 2**64 for word in tree.ancestors[b, node]]
                bits = sum(word << 64 * i for i, word in enumerate(words))
                assert bits == sum(1 << j for j in path)
                assert len(words) == -(-nodes // 64)


def sampled_tree(rng: random.Random, nodes: int) -> tuple[list[int], list[int], list[int]]:
    """Parents, drafted tokens (of siblings, different ones), and samples that often agree."""
    parents = random_parents(rng, nodes)
    draft = [0] * (nodes - 1)
    taken: dict[int, set[int]] = {}
    for i, parent in enumerate(parents):
        draft[i] = rng.choice(sorted(set(range(300)) - taken.setdefault(parent, set())))
        taken[parent].add(draft[i])
    sampled = [
        rng.choice([t for i, t in enumerate(draft) if parents[i] == node] or [299])
        if rng.random() < 0.8
        else rng.randrange(300)
        for node in range(nodes)
    ]
    return parents, draft, sampled


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("accept", [Tree.accept, accept_path_ref])
def test_accepts_the_sampled_path(
    accept: Callable[[Tree, Tensor, Tensor], tuple[Tensor, Tensor]], device: torch.device
) -> None:
    rng = random.Random(1)
    longest = 0
    for nodes in (1, 2, 3, 9, 24, 64, 65, 128, 256):
        cases = [sampled_tree(rng, nodes) for _ in range(20)]
        if nodes >= 64:  # a chain that is accepted whole
            tokens = list(range(1, nodes))
            cases[0] = (list(range(nodes - 1)), tokens, [*tokens, 0])
        parents, draft, sampled = (torch.tensor(x, device=device) for x in zip(*cases, strict=True))
        tree = Tree.from_parents(parents.long().view(20, -1))
        got, num_committed = accept(tree, draft.long().view(20, -1), sampled)
        for b, (up, tokens, samples) in enumerate(cases):
            path = [0]
            while child := [
                i + 1 for i, p in enumerate(up) if p == path[-1] and tokens[i] == samples[path[-1]]
            ]:
                path += child
            longest = max(longest, len(path))
            assert num_committed[b] == len(path)
            assert got[b].tolist() == [*path, *range(len(path), nodes)]
    assert longest == 256


@pytest.mark.parametrize("shape", [Tree.from_parents, tree_ref])
def test_invalid_parents_are_clamped(shape: Shape, device: torch.device) -> None:
    tree = shape(torch.tensor([[5, -3, 2]], device=device))
    assert tree.parents.tolist() == [[0, 0, 0, 2]]
    assert tree.depth.tolist() == [[0, 1, 1, 2]]


@pytest.mark.parametrize("compact", [compact_kv, compact_kv_ref])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (2, 80)])
def test_all_nodes_are_read_before_any_is_written(
    compact: Compact, dtype: torch.dtype, heads: int, dim: int, device: torch.device
) -> None:
    shape = (2, 3, 4, 2, heads, dim)
    torch.manual_seed(0)
    data = torch.randn(shape, device=device).to(dtype)
    before = data.float().flatten(2, 3).clone()
    kv_slots = torch.tensor([[1, 2, 3], [6, 5, 4]], device=device)
    path = torch.tensor([[0, 2, 2], [2, 0, 1]], device=device)
    compact(data, kv_slots, path)
    want = before.clone()
    want[:, :, [2, 6, 5, 4]] = before[:, :, [3, 4, 6, 5]]
    assert torch.equal(data.float().flatten(2, 3), want)


@pytest.mark.parametrize("accept", [Tree.accept, accept_path_ref])
def test_invalid_logits_end_the_path(
    accept: Callable[[Tree, Tensor, Tensor], tuple[Tensor, Tensor]], device: torch.device
) -> None:
    """A sampled -1 agrees with nothing, not even with a candidate that is -1 (not allowed)."""
    tree = Tree.from_parents(torch.tensor([[0, 1, 2]], device=device))
    candidates = torch.tensor([[5, -1, 7]], device=device)
    sampled = torch.tensor([[5, -1, 7, 8]], device=device)
    path, num_committed = accept(tree, candidates, sampled)
    assert num_committed.tolist() == [2] and path.tolist() == [[0, 1, 2, 3]]
