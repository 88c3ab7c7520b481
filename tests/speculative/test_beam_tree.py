"""Trees of beams against a search by hand, and their settings."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.attention.base import Mask
from forerun.core.errors import ConfigError
from forerun.kernels.speculation.tree import unpack_bits
from forerun.speculative.base import SpecCaps
from forerun.speculative.beam_tree import Beams, BeamTree, propose_tree, resolve_tree

SIZE, VOCAB = 6, 40
CHAIN = SpecCaps(num_drafts=4, flexible=True, kv_reserve=5)


class Model:
    """A draft model whose hidden state after a path is a function of its tokens alone."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.embed, self.head = torch.randn(2, VOCAB, SIZE, generator=draw, dtype=torch.float64)
        self.mix = torch.randn(SIZE, SIZE, generator=draw, dtype=torch.float64)
        self.first = torch.randn(2, SIZE, generator=draw, dtype=torch.float64)
        self.states: Tensor | None = None  # of the last step's beams
        self.ran: list[Tensor] = []  # paths [B, n, d]

    def after(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(hidden @ self.mix + self.embed[ids])

    def run(self, beams: Beams) -> Tensor:
        """Continues from what it gave for the beams before."""
        before = self.first.unsqueeze(1).expand(-1, beams.paths.shape[1], -1)
        if self.states is not None:
            before = beams.follow(self.states)
        self.ran.append(beams.paths)
        self.states = self.after(before, beams.paths[:, :, -1])
        return self.states

    def logits(self, hidden: Tensor) -> Tensor:
        return 2 * hidden @ self.head.T


@dataclass
class Node:
    path: tuple[int, ...]
    score: float
    hidden: Tensor  # what the draft model reads beside the last token


def by_hand(model: Model, hidden: Tensor, tree: BeamTree, count: int) -> tuple[Any, list[Any]]:
    """The paths of the best nodes, and those of the beams of each step."""

    def children(path: tuple[int, ...], score: float, hidden: Tensor) -> list[Node]:
        logp = model.logits(hidden).log_softmax(0).tolist()
        best = sorted(range(VOCAB), key=lambda token: -logp[token])[: tree.topk]
        return [Node((*path, token), score + logp[token], hidden) for token in best]

    level = children((), 0.0, hidden)
    every, ran = list(level), []
    for _ in range(tree.steps - 1):
        beams = sorted(level, key=lambda node: -node.score)[: tree.topk]
        ran.append([beam.path for beam in beams])
        level = []
        for beam in beams:
            after = model.after(beam.hidden, torch.tensor(beam.path[-1]))
            level += children(beam.path, beam.score, after)
        every += level
    best = sorted(every, key=lambda node: -node.score)[:count]
    return [node.path for node in best], ran


@pytest.mark.parametrize(
    ("tree", "count"),
    [
        *((BeamTree(1, 3), 3), (BeamTree(4, 3), 20), (BeamTree(6, 4), 70)),
        *((BeamTree(6, 4), count) for count in range(1, 9)),
    ],
    ids=str,
)
def test_the_tree_is_that_of_a_search_by_hand(tree: BeamTree, count: int) -> None:
    model, step = Model(), SimpleNamespace(num_verify_tokens=count + 1)
    run = model.run, model.logits
    draft = propose_tree(step, tree, model.first, run)  # type: ignore[arg-type]
    assert draft.parents is not None
    assert len(model.ran) == min(tree.steps, count) - 1  # no path is longer than the tree
    for request in range(2):
        want, ran = by_hand(model, model.first[request], tree, count)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(
            draft.tokens[request].tolist(), draft.parents[request].tolist(), strict=True
        ):
            assert parent < len(paths)  # a parent comes first
            paths.append((*paths[parent], token))
        assert paths[1:] == want
        for depth, (got, beams) in enumerate(zip(model.ran, ran, strict=False), start=1):
            assert [tuple(path) for path in got[request].tolist()] == beams[: count - depth]


def test_beams_attend_along_their_paths() -> None:
    def attention(q_len: int, offset: int, tree: Tensor) -> Any:
        return unpack_bits(tree, q_len), offset

    beams = Beams(torch.zeros(3, 2, 3, dtype=torch.int64), None)
    step: Any = SimpleNamespace(attention=attention)
    seen, offset = beams.attention(step, -2)
    own = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    want = [[*row, 0, 0, 0] for row in own] + [[0, 0, 0, *row] for row in own]
    assert offset == -2 and seen.int().tolist() == [want] * 3  # type: ignore[attr-defined]


def test_parents_come_first_where_a_token_is_certain() -> None:
    """Then a node is as probable as its parent, up to rounding."""
    step = SimpleNamespace(num_verify_tokens=8)
    certain = torch.full((VOCAB,), -1e4).index_fill(0, torch.tensor([7]), 1e4)

    def logits(hidden: Tensor) -> Tensor:
        return certain.expand(len(hidden), -1)

    first, model = torch.zeros(1, SIZE), (lambda beams: torch.zeros(1, 2, SIZE), logits)
    draft = propose_tree(step, BeamTree(5, 2), first, model)  # type: ignore[arg-type]
    assert draft.parents is not None
    assert draft.parents[0, :5].tolist() == [0, 1, 2, 3, 4]
    assert draft.tokens[0, :5].tolist() == [7] * 5
    assert all(parent <= i for i, parent in enumerate(draft.parents[0].tolist()))


def settings(topk: Any, tokens: int | None = None) -> Any:
    options = {"speculative_eagle_topk": topk}
    return SimpleNamespace(algorithm_options=options, speculative_num_draft_tokens=tokens)


def test_one_branch_is_the_chain() -> None:
    assert resolve_tree(settings(1), CHAIN) is CHAIN
    assert BeamTree.of(settings(1), CHAIN) is None


@pytest.mark.parametrize(("topk", "tokens", "nodes"), [(3, None, 13), (3, 9, 9), (30, None, 64)])
def test_a_tree_needs_room_for_its_nodes_and_its_beams(
    topk: int, tokens: int | None, nodes: int
) -> None:
    caps = resolve_tree(settings(topk, tokens), CHAIN)
    assert caps.num_verify_tokens == nodes and caps.kv_reserve == max(nodes, 3 * topk + 1)
    assert caps.verify_mask is Mask.CUSTOM and caps.draft_trees and caps.flexible
    assert BeamTree.of(settings(topk, tokens), caps) == BeamTree(4, topk)


@pytest.mark.parametrize(
    ("topk", "tokens", "says"),
    [
        (0, None, "must be >= 1, got 0"),
        (True, None, "must be >= 1, got True"),
        (100, None, "run the draft on 300 tokens at once; it takes 256"),
        (2, 4, "must be 5 to 15 for a tree of 4 steps and .* 2, got 4"),
        (2, 16, "must be 5 to 15 .* got 16"),
        (20, 257, "must be 5 to 256 .* got 257"),
    ],
)
def test_settings_of_trees_are_refused(topk: Any, tokens: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_tree(settings(topk, tokens), CHAIN)
    with pytest.raises(ConfigError, match=r"must be 1 \(a chain\), got 2: it has two layers"):
        resolve_tree(settings(2), CHAIN, "it has two layers")
