"""Ranks with parts of the logits sample what one with all of them does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.core.sampling_params import SamplingParams
from forerun.kernels.sampling.params import MAX_OWN_TOP_K
from forerun.layers.communication import Communicator
from forerun.layers.sharding import VocabShard
from forerun.sampling.across import sample_across, sample_by_rows
from forerun.sampling.sampler import SamplingFlags, sample_ref
from tests.sampling.test_sampler import batch_of, request
from tests.thread_ranks import on_ranks

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.4, top_k=MAX_OWN_TOP_K, top_p=0.95),
    SamplingParams(temperature=1.1, min_p=0.05),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.5, min_new_tokens=9),
    SamplingParams(temperature=0.0, min_new_tokens=9),
    SamplingParams(temperature=1e-40),
]


def scene(vocab_size: int, tokens: int) -> Tensor:
    """Logits [requests, W, V] with ties, and invalid rows."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(PARAMS), tokens, vocab_size, generator=generator)
    logits = (logits * 8).round() / 4
    logits[:, 0, vocab_size - 3] = torch.inf
    logits[:, 1, 2] = torch.nan
    logits[:, 2] = -torch.inf
    logits[:, 3, 4:] = -torch.inf
    logits[:, 4] = 1.5
    return logits


@pytest.mark.parametrize("vocab_size", [97, 700])
def test_ranks_sample_as_one(vocab_size: int) -> None:
    """Also where a rank has fewer tokens than are exchanged, and one request at a time."""
    logits = scene(vocab_size, tokens=40)
    stops = (5, vocab_size // 2, vocab_size - 1)
    asked = [request(p, seed, stops=stops) for seed, p in enumerate(PARAMS)]
    batch, flags = batch_of(asked), SamplingFlags.of(each.sampling for each in asked)
    positions = torch.arange(len(PARAMS))[:, None] + torch.arange(40) + 3
    assert not flags.whole_rows and flags.top_k and flags.top_p
    for used in (flags, replace(flags, top_k=False, top_p=False)):
        want = sample_ref(logits, positions, batch, used)

        def work(comm: Communicator, used: SamplingFlags = used) -> Tensor:
            part = VocabShard.of(vocab_size, comm)
            own = logits[..., part.first : part.first + part.count]
            return sample_across(own, part, positions, batch, used, comm)

        for got in on_ranks(3, work):
            assert got.tolist() == want.tolist()
        assert (want[:, :3] == -1).all() and (want[:, 3:] >= 0).all()


@pytest.mark.parametrize(("requests", "tokens"), [(11, 7), (1, 2), (3, 1)])
def test_ranks_divide_the_rows(requests: int, tokens: int) -> None:
    """Also with fewer rows than ranks, and where the ranks' rows or ids are not as many."""
    vocab_size = 700
    params = [*PARAMS, SamplingParams(top_p=0.9), SamplingParams(temperature=1.2, top_k=90)]
    logits = scene(vocab_size, 40)[:1, 3 : 3 + tokens].repeat(requests, 1, 1)
    stops = (5, vocab_size // 2, vocab_size - 1)
    asked = [request(p, seed, stops=stops) for seed, p in enumerate(params[-requests:])]
    batch, flags = batch_of(asked), SamplingFlags.of(each.sampling for each in asked)
    positions = torch.arange(requests)[:, None] + torch.arange(tokens) + 3
    want = sample_ref(logits, positions, batch, flags)

    def work(comm: Communicator) -> Tensor:
        part = VocabShard.of(vocab_size, comm)
        own = logits[..., part.first : part.first + part.count]
        return sample_by_rows(own, part, positions, batch, flags, comm)

    assert flags.whole_rows and len(want.unique()) > 1
    for got in on_ranks(3, work):
        assert got.tolist() == want.tolist()


def test_which_filters_need_whole_rows() -> None:
    def whole(**params: float) -> bool:
        made = request(SamplingParams(temperature=1.0, **params), 0)  # type: ignore[arg-type]
        return SamplingFlags.of([made.sampling]).whole_rows

    assert not whole() and not whole(min_p=0.1) and not whole(top_k=MAX_OWN_TOP_K, top_p=0.5)
    assert whole(top_p=0.9) and whole(top_k=MAX_OWN_TOP_K + 1)
