"""Prompt lookup: kernels and reference against a search written as loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.kernels.cpu import library, step
from forerun.kernels.speculation import prompt_lookup as module
from forerun.kernels.speculation.prompt_lookup import (
    Texts,
    longest_matches,
    prompt_lookup,
    prompt_lookup_ref,
)
from tests.kernels.interpreter import Grids

Lookup = Callable[..., Tensor]


def lookup(tokens: list[int], min_match: int, max_match: int, num_drafts: int) -> list[int]:
    last, longest, at = len(tokens) - 1, min_match - 1, len(tokens) - 2
    for position in reversed(range(last)):
        length = 0
        while length < min(max_match, position + 1):
            if tokens[position - length] != tokens[last - length]:
                break
            length += 1
        if length > longest:
            longest, at = length, position
    text = list(tokens)
    for _ in range(num_drafts):
        at += 1
        text.append(text[at])
    return text[len(tokens) :]


def cpu(*args: Any) -> Tensor:
    if library.library() is None:
        pytest.skip("no C++ compiler")
    history, slots, start, *rest = args
    return step.prompt_lookup(history.cpu(), slots.cpu(), start.cpu(), *rest)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("find", [prompt_lookup_ref, prompt_lookup, cpu])
@pytest.mark.parametrize(("min_match", "max_match"), [(1, 4), (3, 3), (2, 40)])
def test_drafts_follow_the_latest_of_the_longest_matches(
    find: Lookup, min_match: int, max_match: int, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of texts in few letters, from one token to all positions; in several blocks and parts."""
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "MAX_PARTS", 3)
    capacity = 150
    generator = torch.Generator().manual_seed(max_match)
    history = torch.randint(3, (9, capacity), generator=generator, dtype=torch.int32)
    history[4] = torch.arange(capacity)  # nothing matches
    history[5] = 7  # everything does
    history[6, 100:] = history[6, 30:80]  # a long match, in another part
    slots = torch.tensor([8, 0, 4, 5, 6, 1, 2])
    start = torch.tensor([149, 40, 77, 140, 139, 0, 1], dtype=torch.int32)
    given = [x.to(device) for x in (history, slots, start)]
    for num_drafts in (1, 7):
        drafts = find(*given, min_match, max_match, num_drafts).tolist()
        for row, slot, last in zip(drafts, slots.tolist(), start.tolist(), strict=True):
            tokens = history[slot, : last + 1].tolist()
            want = lookup(tokens, min_match, max_match, num_drafts) if last else tokens * num_drafts
            assert row == want, (slot, last)


def test_a_large_corpus_has_a_grid_that_gpus_take(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A grid's y has 65,535 at most."""
    grids = Grids()
    monkeypatch.setattr(module, "_longest_matches", grids)
    rows = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    ends = rows.new_zeros(3, 64), torch.tensor([0, 1], device=device), rows.new_zeros(2)
    texts = Texts(rows.new_zeros(1 << 16, 1), 1, rows, rows, rows)
    assert longest_matches(ends, texts, 1, 4).shape == (2, 1 << 16)
    grids.check(2 << 16)


@pytest.mark.gpu
def test_a_long_history_in_a_graph(device: torch.device) -> None:
    """Lengths change after the capture."""
    history = torch.randint(200, (3, 40_000), dtype=torch.int32, device=device)
    history[1, 39_000:39_500] = history[1, 777:1_277]
    slots, start = torch.tensor([1, 2], device=device), torch.zeros(2, dtype=torch.int32).cuda()
    prompt_lookup(history, slots, start, 1, 4, 15)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = prompt_lookup(history, slots, start, 1, 4, 15)
    for lengths in ([39_250, 39_999], [5, 20_000]):
        start.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(drafts, prompt_lookup_ref(history, slots, start, 1, 4, 15))
