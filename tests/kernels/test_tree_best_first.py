"""The best prefixes: kernel against reference, and the reference against brute force."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch
from torch import Tensor

from forerun.kernels.speculation.best_first import (
    best_first,
    best_first_ref,
    top_log_probs,
    top_log_probs_ref,
)

Prefix = tuple[int, ...]


def marginals(batch: int, depth: int, ranks: int, seed: int, sharp: float = 2.0) -> Tensor:
    """[B, D, R] log-probabilities, descending."""
    made = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, depth, ranks, generator=made, dtype=torch.float64) * sharp
    return logits.log_softmax(-1).sort(-1, descending=True).values.float()


def numbered(scores: Tensor) -> Tensor:
    """The rank is the token."""
    return torch.arange(scores.shape[2], device=scores.device).expand(scores.shape).contiguous()


def prefixes(tokens: Tensor, parents: Tensor) -> list[Prefix]:
    """Of one tree, in its order."""
    known: list[Prefix] = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        assert parent < len(known), "a parent comes first"
        known.append((*known[parent], token))
    return known[1:]


def best_of_all(scores: Tensor, nodes: int) -> list[Prefix]:
    """Scores [D, R]: every prefix there is, sorted."""
    depth, ranks = scores.shape
    value = {
        prefix: sum(float(scores[i, r]) for i, r in enumerate(prefix))
        for length in range(1, depth + 1)
        for prefix in itertools.product(range(ranks), repeat=length)
    }
    return heapq.nlargest(nodes, value, key=value.__getitem__)


@pytest.mark.parametrize(
    ("depth", "ranks", "nodes"), [(1, 8, 5), (3, 5, 20), (6, 3, 63), (2, 4, 1)]
)
def test_no_other_prefix_is_better(depth: int, ranks: int, nodes: int) -> None:
    scores = marginals(4, depth, ranks, seed=depth)
    tokens, parents = best_first_ref(scores, numbered(scores), nodes)
    for b in range(4):
        assert prefixes(tokens[b], parents[b]) == best_of_all(scores[b], nodes)


def test_as_many_ranks_as_nodes_are_enough() -> None:
    for sharp in (0.1, 1.0, 5.0):
        scores = marginals(3, 15, 40, seed=1, sharp=sharp)
        want = best_first_ref(scores, numbered(scores), 32)
        fewer = scores[:, :, :32].contiguous()
        for got, all_ranks in zip(best_first_ref(fewer, numbered(fewer), 32), want, strict=True):
            assert torch.equal(got, all_ranks)


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    """Also where it is made of as many positions and ranks as it has nodes: no more can matter."""
    for sharp in (0.1, 1.0, 5.0):
        scores = marginals(3, 12, 40, seed=2, sharp=sharp)
        whole = best_first_ref(scores, numbered(scores), 40)
        for nodes in (1, 3, 7, 31):
            own = scores[:, :nodes, :nodes].contiguous()
            for got, want in zip(best_first_ref(own, numbered(own), nodes), whole, strict=True):
                assert torch.equal(got, want[:, :nodes])


def test_missing_prefixes_have_no_token() -> None:
    scores = torch.tensor([[[-0.5, -1.0, -torch.inf], [-2.0, torch.nan, -torch.inf]]])
    tokens, parents = best_first_ref(scores, numbered(scores) + 7, 6)
    assert tokens.tolist() == [[7, 8, 7, 7, -1, -1]]
    assert parents.tolist() == [[0, 0, 1, 2, 0, 0]]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("batch", "depth", "ranks", "nodes"),
    [(3, 15, 32, 32), (2, 15, 8, 63), (1, 1, 3, 7), (2, 2, 1, 3), (2, 7, 16, 1)],
)
@pytest.mark.parametrize("kind", ["real", "equals", "holes"])
def test_kernel_matches_reference(
    batch: int, depth: int, ranks: int, nodes: int, kind: str, device: torch.device
) -> None:
    scores = marginals(batch, depth, ranks, seed=nodes)
    if kind == "equals":
        scores = scores.round()
    if kind == "holes":
        scores[:, :, ranks // 2 :] = -torch.inf
        scores[0, depth // 2] = torch.nan
    scores = scores.to(device)
    ids = torch.randint(0, 10**6, scores.shape, device=device)
    want = best_first_ref(scores, ids, nodes)
    for got, expected in zip(best_first(scores, ids, nodes), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "ranks"), [(320, 32), (9001, 5), (3, 3)])
def test_log_probabilities(
    vocab: int, ranks: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(vocab)
    wide = (torch.randn(6, vocab + 5, device=device) * 4).to(dtype)
    logits = wide[:, :vocab].unflatten(0, (2, 3))
    logits[0, 0, 1] = -torch.inf
    for scores, ids in (top_log_probs(logits, ranks), top_log_probs_ref(logits, ranks)):
        whole = logits.double().log_softmax(-1)
        assert torch.equal(logits.gather(-1, ids), logits.topk(ranks).values)
        assert all(len(set(row)) == ranks for row in ids.flatten(0, 1).tolist())
        torch.testing.assert_close(scores.double(), whole.gather(-1, ids), rtol=1e-5, atol=1e-5)


def test_nan_is_no_token(device: torch.device) -> None:
    logits = torch.randn(1, 3, 50, device=device)
    logits[0, 1] = torch.nan
    for top in (top_log_probs, top_log_probs_ref):
        tokens, parents = best_first(*top(logits, 4), 6)
        assert tokens[0, :4].tolist() == logits[0, 0].topk(4).indices.tolist()
        assert tokens[0, 4:].tolist() == [-1] * 2 and parents.tolist() == [[0] * 6]
