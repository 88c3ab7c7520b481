"""The sampler: greedy requests, independence of the batch, masked stop ids, the slot table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forerun.core.errors import RequestError
from forerun.core.request import Request
from forerun.core.sampling_params import MAX_STOP_IDS, SamplingParams, check_stop_ids
from forerun.kernels.sampling.params import SamplingBatch
from forerun.sampling.noise import gumbel_argmax
from forerun.sampling.sampler import SAMPLED, SamplingFlags, sample
from forerun.sampling.table import SamplingTable
from tests.property_examples import examples

VOCABULARY, NUM_TOKENS = 97, 5
EVERYTHING = SAMPLED
# Every kind of request, so that any two are neighbours in some batch.
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.1, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.5, min_new_tokens=4),
    SamplingParams(temperature=0.0, min_new_tokens=9),
    SamplingParams(temperature=1e-40),
]
SEEDS = [0, 1, 2, 3, -1, 2**63 - 1, 6, 7, 8, -(2**63)]


def request(
    params: SamplingParams, seed: int, prompt: int = 3, stops: tuple[int, ...] = ()
) -> Request:
    return Request("r", tuple(range(prompt)), params, seed, frozenset(stops))


def requests() -> list[Request]:
    return [
        request(p, s, prompt=3 + i, stops=(5, 6, 40 + i))
        for i, (p, s) in enumerate(zip(PARAMS, SEEDS, strict=True))
    ]


def flags_of(params: Sequence[SamplingParams]) -> SamplingFlags:
    return SamplingFlags.of(request(p, 0, stops=(5,)).sampling for p in params)


def batch_of(batch: list[Request]) -> SamplingBatch:
    table = SamplingTable(len(batch) + 2, torch.device("cpu"))
    table.set(range(len(batch)), [r.sampling for r in batch])
    return table.gather(torch.arange(len(batch)))


def scene(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits [requests, W, V] with ties, and positions [requests, W]."""
    logits = torch.randn(
        len(PARAMS), NUM_TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(seed)
    )
    return (logits * 8).round() / 4, torch.arange(len(PARAMS))[:, None] + torch.arange(
        NUM_TOKENS
    ) + 3


def pick(batch: SamplingBatch, index: list[int]) -> SamplingBatch:
    return SamplingBatch(batch.floats, batch.ints, batch.slots[index])


@examples(120)
@given(
    st.lists(st.integers(0, len(PARAMS) - 1), min_size=1, max_size=12),
    st.booleans(),
    st.integers(0, 3),
)
def test_a_token_does_not_depend_on_its_neighbours(
    index: list[int], exact_flags: bool, seed: int
) -> None:
    batch, (logits, positions) = batch_of(requests()), scene(seed)
    whole = sample(logits, positions, batch, EVERYTHING)
    flags = flags_of([PARAMS[i] for i in index]) if exact_flags else EVERYTHING
    part = sample(logits[index], positions[index], pick(batch, index), flags)
    assert torch.equal(part, whole[index])


def test_one_position_at_a_time_samples_the_same_as_a_block() -> None:
    batch = batch_of(requests())
    logits = torch.randn(len(PARAMS), 16, 301, generator=torch.Generator().manual_seed(4)) * 2
    positions = torch.arange(16).expand(len(PARAMS), 16) + 1000
    whole = sample(logits, positions, batch, EVERYTHING)
    single = [
        sample(logits[:, w : w + 1], positions[:, w : w + 1], batch, EVERYTHING) for w in range(16)
    ]
    assert torch.equal(torch.cat(single, 1), whole)
    moved = sample(logits, positions + 1, batch, EVERYTHING)
    assert not torch.equal(moved[1], whole[1])  # and the position matters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_first_largest_logit(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 3, 2000, generator=torch.Generator().manual_seed(5)).to(dtype)
    logits[:, :, 700] = logits[:, :, 1500] = 6.0
    logits[1, :, :] = -0.0
    logits[1, :, 4] = 0.0  # equal to -0
    logits[2, :, :] = 1e-3  # nearly equal, but not
    logits[2, :, 9] = (
        torch.nextafter(logits[2, 0, 0].float(), torch.tensor(1.0))
        if (dtype == torch.float32)
        else 1.1e-3
    )
    before = logits.clone()
    users = [request(SamplingParams(temperature=0.0), 1) for _ in range(2)]
    users += [request(SamplingParams(top_k=1), 1), request(SamplingParams(temperature=1.0), 1)]
    batch, positions = batch_of(users), torch.arange(3).expand(4, 3)
    expected = torch.tensor([[700] * 3, [0] * 3, [9] * 3])
    assert torch.equal(sample(logits, positions, batch, SamplingFlags())[:3], expected)
    assert torch.equal(sample(logits, positions, batch, EVERYTHING)[:3], expected)
    assert torch.equal(logits, before)


def test_plain_temperature_samples_as_gumbel_argmax() -> None:
    batch = batch_of([request(SamplingParams(temperature=0.5), seed) for seed in range(6)])
    logits = torch.randn(6, 4, 500, generator=torch.Generator().manual_seed(6))
    positions = torch.arange(4) + torch.arange(6)[:, None]
    sampled = sample(logits, positions, batch, SamplingFlags(sampled=True))
    assert torch.equal(sampled, gumbel_argmax(logits / 0.5, batch.key[:, None], positions))


def test_stop_ids_are_masked_until_min_new_tokens() -> None:
    stops = (2, 5, 11)
    params = [
        SamplingParams(temperature=0.0, min_new_tokens=3),
        SamplingParams(temperature=1.0, min_new_tokens=3, top_p=0.5),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, min_new_tokens=3),  # ignores EOS: nothing to mask
    ]
    batch = [request(p, 1, prompt=10, stops=stops) for p in params[:3]]
    batch.append(request(params[3], 1, prompt=10))
    logits = torch.zeros(4, 6, 20)
    logits[:, :, list(stops)] = 9.0
    logits[:, :, 0] = 5.0
    positions = torch.arange(9, 15).expand(4, 6)  # the first new token stands at 10
    sampled = sample(logits, positions, batch_of(batch), flags_of(params))
    assert sampled[0].tolist() == [0, 0, 0, 0, 2, 2]
    masked = [int(t) in stops for t in sampled[1]]
    assert masked == [False] * 4 + [True] * 2
    assert sampled[2].tolist() == sampled[3].tolist() == [2] * 6
    assert float(logits.max()) == 9.0 and logits.isfinite().all()  # the caller's stay as they were


def test_tokens_of_probability_zero_are_never_sampled() -> None:
    batch = batch_of([request(SamplingParams(temperature=1.0), seed) for seed in range(4000)])
    logits = torch.full((4000, 2, 50), -torch.inf)
    logits[:, :, 17] = -1000.0
    logits[:, :, 31] = -1003.0
    positions = torch.arange(2).expand(4000, 2)
    sampled = sample(logits, positions, batch, SamplingFlags(sampled=True))
    assert set(sampled.flatten().tolist()) == {17, 31}


def test_flags_state_what_a_batch_needs() -> None:
    none = SamplingFlags()
    assert SamplingFlags.of([]) == none
    assert flags_of([SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1)]) == none
    assert flags_of([SamplingParams(top_k=1, top_p=0.5)]) == none
    assert flags_of(PARAMS) == EVERYTHING
    assert flags_of([SamplingParams()]) == SamplingFlags(sampled=True)
    top_p = SamplingFlags(sampled=True, top_p=True, whole_rows=True)
    assert flags_of([SamplingParams(top_p=0.9)]) == top_p


def test_table_keeps_slots_apart() -> None:
    table = SamplingTable(6, torch.device("cpu"))
    table.set([], [])
    users = requests()
    table.set([4, 1], [users[5].sampling, users[7].sampling])
    table.set([1], [users[0].sampling])  # the slot changes hands
    batch = table.gather(torch.tensor([1, 4, 0]))
    assert batch.temperature.tolist() == pytest.approx([0.0, 0.9, 0.0])
    assert batch.top_k.tolist() == [-1, 20, 0]
    assert batch.top_p.tolist() == pytest.approx([1.0, 0.8, 0.0])
    assert batch.min_p.tolist() == pytest.approx([0.0, 0.02, 0.0])
    assert batch.min_position.tolist() == [0, 0, 0]
    table.set([0], [users[8].sampling])
    batch = table.gather(torch.tensor([0]))
    assert batch.min_position.tolist() == [11 + 9]
    assert set(batch.stop_ids[0].tolist()) == {5, 6, 48}
    assert batch.stop_ids.shape == (1, MAX_STOP_IDS)


def test_too_many_stop_ids_are_refused() -> None:
    many = frozenset(range(MAX_STOP_IDS + 1))
    check_stop_ids(SamplingParams(), many)
    check_stop_ids(SamplingParams(min_new_tokens=1), frozenset(range(MAX_STOP_IDS)))
    with pytest.raises(RequestError, match=r"at most 16 stop ids \(EOS included\), got 17; give"):
        check_stop_ids(SamplingParams(min_new_tokens=1), many)
    table = SamplingTable(1, torch.device("cpu"))
    table.set([0], [Request("r", (1,), SamplingParams(), 0, many).sampling])  # nothing to mask
    assert table.gather(torch.tensor([0])).min_position.tolist() == [0]


@pytest.mark.gpu
def test_a_cuda_graph_samples_what_the_cpu_samples() -> None:
    device = torch.device("cuda")
    table = SamplingTable(len(PARAMS), device)
    table.set(range(len(PARAMS)), [r.sampling for r in requests()])
    (logits, positions), slots = scene(), torch.arange(len(PARAMS), device=device)
    expected = sample(logits, positions, batch_of(requests()), EVERYTHING)
    logits, positions = logits.to(device), positions.to(device)
    sample(logits, positions, table.gather(slots), EVERYTHING)  # warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = sample(logits, positions, table.gather(slots), EVERYTHING)
    graph.replay()
    assert torch.equal(sampled.cpu(), expected)
