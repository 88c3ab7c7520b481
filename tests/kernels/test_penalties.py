"""Biases and penalties: the reference against formulas and counters, the kernel against it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forerun.core.request import Request
from forerun.core.sampling_params import MAX_BIASES, SamplingParams
from forerun.kernels.sampling.penalties import (
    DraftPath,
    PenaltyBatch,
    count_tokens_ref,
    penalize,
    penalize_ref,
)
from forerun.kernels.speculation.tree import Tree
from forerun.sampling.penalties import PackedPenalties, PenaltyTable
from tests.property_examples import examples

KINDS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.5},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": -0.2, "presence_penalty": 0.4, "repetition_penalty": 0.8},
    {"logit_bias": {0: 100.0, 5: -100.0, 17: 0.25}},
    {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {3: 1.5, 9: -4.0}},
    {"logit_bias": {i: i / 64 for i in range(60)}},
]


def batch_of(
    kinds: list[dict[str, Any]], prompts: list[list[int]], outputs: list[list[int]], device: Any
) -> PenaltyBatch:
    """Requests in slots 1, 2, ... in reverse order; slot 0 and what is not known holds garbage."""
    count = len(kinds)
    table = PenaltyTable(count + 1, torch.device(device))
    history = torch.full((count + 1, 64), 2**30, dtype=torch.int32)
    slots = list(range(count, 0, -1))
    rows = []
    for slot, kind, prompt, output in zip(slots, kinds, prompts, outputs, strict=True):
        request = Request("r", tuple(prompt), SamplingParams(**kind), 0, frozenset())
        rows.append(PackedPenalties.of(slot, request.sampling, len(prompt)))
        history[slot, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
    table.set(rows)
    return table.gather(torch.tensor(slots, device=device), history.to(device))


def scene(
    vocab: int, width: int, seed: int
) -> tuple[list[list[int]], list[list[int]], Tensor, Tensor]:
    """Prompts and outputs of small ids, logits [B, W, V], ids [B, W] that begin with the last."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(min(vocab, 9), (count,), generator=generator).tolist()

    prompts = [ids(1 + 3 * i) for i in range(len(KINDS))]
    outputs = [ids(2 * i) for i in range(len(KINDS))]
    logits = torch.randn(len(KINDS), width, vocab, generator=generator) * 4
    last = torch.tensor([[(p + o)[-1]] for p, o in zip(prompts, outputs, strict=True)])
    drafts = torch.tensor([ids(width - 1) for _ in KINDS], dtype=torch.int64)
    drafts = drafts.view(len(KINDS), width - 1)
    return prompts, outputs, logits, torch.cat([last, drafts], 1)


def positions_of(prompts: list[list[int]], outputs: list[list[int]], width: int) -> Tensor:
    """Of the tokens to be sampled, in a chain."""
    first = [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]
    return torch.tensor(first)[:, None] + torch.arange(width)


def by_hand(logits: Tensor, kind: dict[str, Any], prompt: list[int], output: list[int]) -> Tensor:
    """One row, token by token."""
    params, counts = SamplingParams(**kind), Counter(output)
    row = logits.double().clone()
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in {*prompt, *output}:
        value = float(row[token])
        penalty = params.repetition_penalty
        row[token] = value / penalty if value > 0 else value * penalty
    for token, count in counts.items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    return row


@pytest.mark.parametrize("width", [1, 2, 5])
def test_rows_of_a_chain_equal_the_formula(width: int) -> None:
    prompts, outputs, logits, ids = scene(61, width, seed=width)
    batch = batch_of(KINDS, prompts, outputs, "cpu")
    positions = positions_of(prompts, outputs, width)
    got = penalize_ref(logits, positions, batch, DraftPath(ids, None), bound=64)
    for i, kind in enumerate(KINDS):
        for row in range(width):
            # The last token is in the prompt or in the output already.
            before = [*outputs[i], *ids[i, 1 : row + 1].tolist()]
            want = by_hand(logits[i, row], kind, prompts[i], before)
            assert torch.allclose(got[i, row].double(), want, atol=1e-5)
    assert torch.equal(got[0], logits[0])


def test_rows_of_a_tree_see_their_ancestors() -> None:
    prompts, outputs, logits, ids = scene(61, 6, seed=3)
    parents = torch.tensor([0, 0, 1, 2, 3]).repeat(len(KINDS), 1)  # two branches
    paths = [[], [1], [2], [1, 3], [2, 4], [1, 3, 5]]
    tree = Tree.from_parents(parents)
    start = positions_of(prompts, outputs, 1)
    batch = batch_of(KINDS, prompts, outputs, "cpu")
    got = penalize_ref(logits, start + tree.depth, batch, DraftPath(ids, tree.ancestors), bound=64)
    for i, kind in enumerate(KINDS):
        for row, path in enumerate(paths):
            before = [*outputs[i], *ids[i, path].tolist()]
            want = by_hand(logits[i, row], kind, prompts[i], before)
            assert torch.allclose(got[i, row].double(), want, atol=1e-5)


def test_repetition_penalty_equals_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(5)
    tokens, logits = [3, 1, 4, 1, 5, 9, 2, 6], torch.randn(1, 1, 50, generator=generator)
    for penalty in (0.5, 1.2, 2.0):
        batch = batch_of([{"repetition_penalty": penalty}], [tokens[:5]], [tokens[5:]], "cpu")
        got = penalize_ref(logits, torch.tensor([[8]]), batch, None, bound=8)
        want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits[0].clone())
        assert torch.equal(got[0], want)


@examples(60)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=30),
    st.lists(st.integers(0, 12), max_size=30),
    st.integers(0, 3),
)
def test_counts_are_those_of_a_counter(prompt: list[int], output: list[int], spare: int) -> None:
    """Of any bound that exceeds the known positions."""
    batch = batch_of([{"frequency_penalty": 1.0}], [prompt], [output], "cpu")
    known = len(prompt) + len(output)
    counts, in_prompt = count_tokens_ref(batch, torch.tensor([known - 1]), 13, known + spare)
    counter = Counter(output)
    assert counts[0].tolist() == [counter[token] for token in range(13)]
    assert in_prompt[0].tolist() == [token in prompt for token in range(13)]


def test_a_slot_that_changes_hands_is_neutral_again() -> None:
    table = PenaltyTable(3, torch.device("cpu"))
    sampling = [
        Request("r", (1,), SamplingParams(**kind), 0, frozenset()).sampling for kind in KINDS
    ]
    table.set([PackedPenalties.of(1, sampling[6], 1), PackedPenalties.of(2, sampling[3], 1)])
    table.set([PackedPenalties.of(1, sampling[0], 1)])
    history = torch.zeros(3, 8, dtype=torch.int32)
    batch = table.gather(torch.tensor([1, 2, 0]), history)
    logits = torch.randn(3, 1, 20, generator=torch.Generator().manual_seed(1))
    got = penalize_ref(logits, torch.full((3, 1), 4), batch, None, bound=8)
    assert torch.equal(got[0], logits[0]) and torch.equal(got[2], logits[2])
    assert not torch.equal(got[1], logits[1])
    most = dict.fromkeys(range(MAX_BIASES), 1.0)
    full = Request("r", (1,), SamplingParams(logit_bias=most), 0, frozenset())  # type: ignore[arg-type]
    table.set([PackedPenalties.of(0, full.sampling, 1)])


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("shape", ["plain", "chain", "tree", "wide tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(device: torch.device, dtype: torch.dtype, shape: str) -> None:
    vocab, width = 2500, {"plain": 1, "wide tree": 70}.get(shape, 6)
    prompts, outputs, logits, ids = scene(vocab, width, seed=9)
    logits, ids = logits.to(dtype), ids.clone()
    logits[1, 0, 7], logits[2, 0, 2000] = torch.nan, -torch.inf
    if width > 1:
        ids[:, 2] = 2400  # in another block than the others
    path = None if width == 1 else DraftPath(ids, None)
    positions = positions_of(prompts, outputs, width)
    if "tree" in shape:  # two branches
        parents = (torch.arange(width - 1) - 1).clamp_min(0)
        tree = Tree.from_parents(parents.repeat(len(KINDS), 1).to(device))
        positions = positions[:, :1] + tree.depth.cpu()
        path = DraftPath(ids, tree.ancestors.cpu())
    want = penalize_ref(logits, positions, batch_of(KINDS, prompts, outputs, "cpu"), path, 64)
    if path is not None:
        above = None if path.ancestors is None else path.ancestors.to(device)
        path = DraftPath(path.ids.to(device), above)
    batch = batch_of(KINDS, prompts, outputs, device)
    before = logits.to(device)
    got = penalize(before.clone(), positions.int().to(device), batch, path, bound=40)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert torch.equal(got[0], before[0].float())  # without penalties: bit for bit


@pytest.mark.gpu
def test_kernel_at_real_size(device: torch.device) -> None:
    """32 requests of 16 tokens, 151,936 tokens in the vocabulary, rows with a stride."""
    vocab, width, requests = 151936, 16, 32
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(vocab, (requests, 60), generator=generator)
    kinds = [KINDS[i % len(KINDS)] for i in range(requests)]
    prompts, outputs = tokens[:, :20].tolist(), tokens[:, 20:].tolist()
    batch = batch_of(kinds, prompts, outputs, device)
    wide = torch.randn(requests * width, vocab + 64, generator=generator).to(device, torch.bfloat16)
    logits = wide[:, :vocab].unflatten(0, (requests, width))
    ids = torch.randint(vocab, (requests, width), generator=generator).to(device)
    positions = positions_of(prompts, outputs, width).int().to(device)
    got = penalize(logits, positions, batch, DraftPath(ids, None), bound=64)
    want = penalize_ref(logits, positions, batch, DraftPath(ids, None), bound=64)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
