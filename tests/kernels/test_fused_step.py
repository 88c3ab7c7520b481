"""Argmax, accept and commit, simulated acceptance, decode inputs: kernels against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from forerun.kernels.sampling import argmax as argmax_module
from forerun.kernels.sampling.argmax import (
    argmax,
    argmax_keys,
    argmax_keys_ref,
    argmax_ref,
    ids_of_keys,
)
from forerun.kernels.speculation.accept import SlotState, accept_commit, accept_commit_ref
from forerun.kernels.speculation.decode_inputs import build_decode_inputs, build_decode_inputs_ref
from forerun.speculative.simulate import SimulatedAcceptance
from tests.kernels.interpreter import Grids


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (3, 2048), (2, 9001)])
def test_argmax(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    check_argmax(rows, vocab, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 480])
def test_argmax_real(rows: int, device: torch.device) -> None:
    check_argmax(rows, 151_936, torch.bfloat16, device)


def test_argmax_of_many_rows_has_a_grid_that_gpus_take(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """256 requests verify trees of 256 tokens; a grid's y has 65,535 at most."""
    grids = Grids()
    monkeypatch.setattr(argmax_module, "_argmax_part", grids)
    monkeypatch.setattr(argmax_module, "_argmax_reduce", Grids())
    argmax(torch.zeros(1, 20_000, device=device).expand(1 << 16, -1))
    grids.check(3 << 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_argmax_of_a_vocabulary_in_parts(dtype: torch.dtype, device: torch.device) -> None:
    """The largest key has the id that the whole row has; keys are those of the reference."""
    vocab, first = 3000, 1024
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    logits[1, 100] = logits[1, 2900] = 40.0
    logits[2, 2000], logits[3, 50], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[5, :first] = -torch.inf
    parts = logits[:, :first], logits[:, first:]
    keys = [argmax_keys(part, at) for part, at in zip(parts, (0, first), strict=True)]
    for got, part, at in zip(keys, parts, (0, first), strict=True):
        want = argmax_keys_ref(part, at)
        valid = ~part.isnan().any(-1)
        assert torch.equal(got[valid], want[valid])
        assert torch.equal(got >> 32, want >> 32)  # where there is a NaN, the id has no meaning
    assert torch.equal(ids_of_keys(torch.stack(keys).amax(0)), argmax_ref(logits))


def check_argmax(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab + 3, generator=generator).to(device, dtype)[:, :vocab]
    assert torch.equal(argmax(logits), logits.float().cpu().argmax(-1).to(device))
    # Many equals: the lowest id, wherever the parts are cut.
    tied = logits.clamp(max=1.0)
    first = (tied == tied.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(argmax(tied), first)
    signs = logits * 0  # 0 and -0 are equal
    assert torch.equal(argmax(signs), torch.zeros_like(first))
    masked = torch.where(logits > 1, -torch.inf, logits)
    assert torch.equal(argmax(masked), masked.argmax(-1))
    # Invalid rows: one NaN or +inf anywhere, or nothing but -inf.
    for i, place in enumerate((0, vocab // 2, vocab - 1)):
        for bad in (torch.nan, torch.inf, -torch.nan):
            broken = logits.clone()
            broken[i % rows, place] = bad
            want = argmax(logits)
            want[i % rows] = -1
            assert torch.equal(argmax(broken), want)
            assert torch.equal(argmax_ref(broken), want)
            assert torch.equal(argmax(broken, invalid=0), want.clamp_min(0))
    empty = torch.full_like(logits, -torch.inf)
    assert argmax(empty).tolist() == argmax_ref(empty).tolist() == [-1] * rows


def slot_state(slots: int, positions: int) -> SlotState:
    """`slots` and the padding slot."""
    lengths = torch.arange(slots + 1, dtype=torch.int32)
    lengths[-1] = 0
    history = torch.zeros(slots + 1, positions, dtype=torch.int32)
    return SlotState(lengths, torch.arange(slots + 1), history)


def on(state: SlotState, device: torch.device) -> SlotState:
    return SlotState(*(x.clone().to(device) for x in vars(state).values()))


@pytest.mark.parametrize("num_drafts", [0, 1, 4, 15])
@pytest.mark.parametrize("given", [False, True])
def test_accept_commit(num_drafts: int, given: bool, device: torch.device) -> None:
    """Requests that agree in 0 ... K places, in shuffled slots, and padding slots."""
    num_tokens, slots, batch = num_drafts + 1, 24, num_drafts + 3
    generator = torch.Generator().manual_seed(0)
    sampled = torch.randint(0, 50, (batch, num_tokens), generator=generator)
    candidates = sampled[:, :num_drafts].clone()
    for i in range(num_drafts):
        candidates[i, i] += 1
    taken = torch.randperm(slots, generator=generator)[:batch]
    taken[-2:] = slots  # the padding slot
    start = torch.randint(0, 30, (batch,), generator=generator, dtype=torch.int32)
    start[-2:] = 0
    count = torch.randint(1, num_tokens + 1, (batch,), generator=generator, dtype=torch.int32)
    before = slot_state(slots, 64)
    want, state = on(before, torch.device("cpu")), on(before, device)
    num_committed, ids = accept_commit_ref(
        candidates, sampled, taken, start, want, count if given else None
    )
    inputs = [x.to(device) for x in (candidates, sampled, taken, start)]
    got, got_ids = accept_commit(*inputs, state, count.to(device) if given else None)

    if not given:
        assert num_committed.tolist() == [*range(1, num_drafts + 1), *[num_tokens] * 3]
    assert torch.equal(got.cpu(), num_committed)
    assert torch.equal(got_ids.cpu(), ids) and torch.equal(ids, sampled)
    for table, expected in zip(vars(state).values(), vars(want).values(), strict=True):
        # The padding slot's entries are written by several requests, in any order.
        assert torch.equal(table.cpu()[:-1], expected[:-1])
    assert state.kv_len[-1] == 0


@pytest.mark.parametrize("commit", [accept_commit, accept_commit_ref])
def test_invalid_tokens_end_the_commit_and_stay_in_range(
    commit: Callable[..., tuple[Tensor, Tensor]], device: torch.device
) -> None:
    """-1 is sampled from NaN logits: it agrees with nothing, and no table holds it."""
    sampled = torch.tensor([[-1, 3, 4], [7, -1, 9], [7, 8, -1]], device=device)
    candidates = torch.tensor([[-1, 3], [7, -1], [7, 8]], device=device)
    state, slots = on(slot_state(4, 16), device), torch.arange(3, device=device)
    start = torch.full((3,), 5, dtype=torch.int32, device=device)
    num_committed, ids = commit(candidates, sampled, slots, start, state)
    assert num_committed.tolist() == [1, 2, 3]
    assert ids.tolist() == [[0, 3, 4], [7, 0, 9], [7, 8, 0]]
    assert state.last_token[:3].tolist() == [0, 0, 0]
    assert state.history[:3, 6:9].tolist() == ids.tolist()
    assert state.kv_len[:3].tolist() == [6, 7, 8]


@pytest.mark.parametrize("mean", [1.0, 1.2, 3.0, 6.5, 10.0])
def test_simulated_acceptance(mean: float, device: torch.device) -> None:
    """A slot's steps add up to the mean, in the kernel as in its reference, after any number."""
    slots, num_tokens, steps = torch.tensor([2, 0]), 10, 40
    kernel = SimulatedAcceptance.of(mean, num_tokens, 4, device)
    reference = SimulatedAcceptance.of(mean, num_tokens, 4, torch.device("cpu"))
    for simulated in (kernel, reference):
        simulated.steps.zero_()
        simulated.steps[0] = 50_000
    total = torch.zeros(2, dtype=torch.int64)
    for _ in range(steps):
        want = reference.num_committed_ref(slots, num_tokens)
        got = kernel.num_committed(slots.to(device), num_tokens)
        assert torch.equal(got.cpu(), want) and got.dtype == want.dtype == torch.int32
        assert int(mean) <= int(want.min()) and int(want.max()) <= int(mean) + 1
        total += want
    assert total.tolist() == [int(steps * mean + 1e-6)] * 2
    assert kernel.steps.tolist() == [50_000 + steps, 0, steps, 0]
    for simulated in (kernel, reference):
        simulated.set(2.0)
    assert reference.num_committed_ref(slots, num_tokens).tolist() == [2, 2]
    assert kernel.num_committed(slots.to(device), num_tokens).tolist() == [2, 2]
    assert kernel.num_committed(slots.to(device), 1).tolist() == [1, 1]  # a narrower step


def test_requests_have_one_of_several_accept_lengths(device: torch.device) -> None:
    simulated = SimulatedAcceptance.of((1.0, 3.0, 5.0), 8, 6, device)
    simulated.admit([0, 1, 2, 3, 4, 5])
    slots = torch.tensor([5, 0, 1, 2, 3], device=device)
    for _ in range(3):
        assert simulated.num_committed(slots, 8).tolist() == [5, 1, 3, 5, 1]
    assert simulated.num_committed(slots, 4).tolist() == [4, 1, 3, 4, 1]
    # Slots that come free together had one length; who takes them has the lengths in turn.
    for taken, expected in (([5, 2], [1, 3]), ([2, 5], [1, 5])):
        simulated.admit(taken)
        assert simulated.num_committed(slots[[0, 3]], 8).tolist() == expected
    simulated.set((2.0,))
    simulated.admit([5])
    assert simulated.num_committed(slots, 8).tolist() == [2] * 5


@pytest.mark.exhaustive
def test_accept_lengths_by_chance(device: torch.device) -> None:
    """The mean is the one that is asked for, drafts are accepted at one rate, lengths vary."""
    means, num_tokens, count = (1.3, 5.0), 16, 20
    kernel = SimulatedAcceptance.of(means, num_tokens, count, device, by_chance=True)
    reference = SimulatedAcceptance.of(means, num_tokens, count, torch.device("cpu"), True)
    slots = torch.arange(count)
    seen = torch.stack([reference.num_committed_ref(slots, num_tokens) for _ in range(600)])
    for step in range(20):
        got = kernel.num_committed(slots.to(device), num_tokens)
        assert torch.equal(got.cpu(), seen[step])
    for first, mean in enumerate(means):
        of_mean = seen[:, first::2].double()
        assert of_mean.mean().item() == pytest.approx(mean, rel=0.03)
        accepted = [(of_mean > k).double().mean().item() for k in range(1, 4)]
        rates = [after / before for before, after in pairwise([1.0, *accepted])]
        assert max(rates) - min(rates) < 0.06
    assert seen[:, 1].unique().numel() > 8
    assert len({tuple(column) for column in seen[:, 1::2].t().tolist()}) == 10


@pytest.mark.gpu
def test_a_captured_step_follows_the_mean(device: torch.device) -> None:
    """`set` takes effect at the next replay of a CUDA graph."""
    simulated = SimulatedAcceptance.of(1.0, 8, 4, device)
    slots = torch.tensor([0, 2], device=device)
    simulated.num_committed(slots, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = simulated.num_committed(slots, 8)
    for mean in (1.0, 5.0, 3.0):
        simulated.set(mean)
        graph.replay()
        assert out.tolist() == [mean] * 2


@pytest.mark.parametrize("num_tokens", [1, 10, 16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_decode_inputs(page_size: int, num_tokens: int, device: torch.device) -> None:
    check_decode_inputs(5, 9, 60, num_tokens, page_size, device)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 32])
def test_decode_inputs_real(batch: int, device: torch.device) -> None:
    check_decode_inputs(batch, 64, 40_000, 16, 16, device)


def check_decode_inputs(
    batch: int, slots: int, positions: int, num_tokens: int, page_size: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    kv_len = torch.randint(
        0, positions - num_tokens, (slots,), generator=generator, dtype=torch.int32
    )
    last = torch.randint(0, 10**9, (slots,), generator=generator)
    pages = -(-positions // page_size)
    table = torch.randint(0, 2**20, (slots, pages), generator=generator, dtype=torch.int32)
    taken = torch.randperm(slots, generator=generator)[:batch]
    sizes = (num_tokens, page_size, int(kv_len[taken].max()) + num_tokens)
    want = build_decode_inputs_ref(taken, kv_len, last, table, *sizes)
    got = build_decode_inputs(*(x.to(device) for x in (taken, kv_len, last, table)), *sizes)
    for name, expected in vars(want).items():
        found = vars(got)[name]
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected), name
    # By the definition: the last token of the last request.
    position = int(kv_len[taken[-1]]) + num_tokens - 1
    kv_slot = int(table[taken[-1], position // page_size]) * page_size + position % page_size
    assert int(got.kv_slots[-1]) == kv_slot and int(got.positions[-1]) == position
