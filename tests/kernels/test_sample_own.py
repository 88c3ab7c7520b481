"""Ranks with parts of the logits sample what the reference does with all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.core.sampling_params import SamplingParams
from forerun.kernels.sampling.params import MAX_OWN_TOP_K, SamplingBatch
from forerun.kernels.sampling.sample import group_maxima, mask_stop_tokens
from forerun.kernels.sampling.sample_own import choose, sample_own
from forerun.layers.communication import Communicator, UnreducedRank
from forerun.layers.sharding import VocabShard
from forerun.sampling.across import sample_across
from forerun.sampling.sampler import SamplingFlags, sample, sample_ref
from tests.kernels.test_fused_sampling import PARAMS as ANY_PARAMS
from tests.kernels.test_fused_sampling import _scene as scene_of
from tests.kernels.test_fused_sampling import flags_of, make_batch
from tests.thread_ranks import on_ranks

PARAMS = [p for p in ANY_PARAMS if not flags_of([p]).whole_rows]
PARAMS += [
    SamplingParams(temperature=1.4, top_k=MAX_OWN_TOP_K, top_p=0.95),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_new_tokens=9),
]


def in_turn(
    logits: Tensor, positions: Tensor, batch: SamplingBatch, flags: SamplingFlags, ranks: int
) -> Tensor:
    """As `sample_across`, one rank after the other."""
    vocab, at = logits.shape[-1], positions.flatten()
    parts = [VocabShard.of(vocab, UnreducedRank(rank, ranks)) for rank in range(ranks)]
    owns = [logits[..., p.first : p.first + p.count].flatten(0, 1).clone() for p in parts]
    for part, own in zip(parts, owns, strict=True):
        mask_stop_tokens(own, at, batch, part.first)
    maxima = [group_maxima(own) for own in owns]
    largest = torch.stack([each.amax(-1) for each in maxima]).amax(0)
    best = [
        sample_own(own, group_max, largest, at, batch, part.first, flags.top_k)
        for part, own, group_max in zip(parts, owns, maxima, strict=True)
    ]
    return choose(torch.cat(best, -1), ranks, largest, at, batch, vocab).view(positions.shape)


def positions_of(logits: Tensor) -> Tensor:
    size, width, _ = logits.shape
    return torch.arange(size * width, device=logits.device).view(size, width) % 23


def make_scene(name: str, width: int, vocab: int, device: torch.device) -> Tensor:
    return scene_of(name, width, vocab, torch.float32, device)[: len(PARAMS)]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(("ranks", "vocab"), [(2, 97), (2, 2200), (3, 2200)])
@pytest.mark.parametrize("scene", ["normal", "peaked", "tied", "flat", "near"])
def test_tokens(scene: str, ranks: int, vocab: int, device: torch.device) -> None:
    """Flat rows have more tokens of one logit than candidates fit into registers."""
    logits = make_scene(scene, 1, vocab, device)
    positions, batch, flags = positions_of(logits), make_batch(device, PARAMS), flags_of(PARAMS)
    assert flags.top_k and flags.top_p and flags.min_p and not flags.whole_rows
    want = sample_ref(logits.clone(), positions, batch, flags)
    assert torch.equal(in_turn(logits, positions, batch, flags, ranks), want)


def test_tokens_without_top_k(device: torch.device) -> None:
    """One number per rank and row is exchanged."""
    params = [p for p in PARAMS if p.top_k < 1]
    logits = make_scene("tied", 2, 700, device)[: len(params)]
    positions, batch, flags = positions_of(logits), make_batch(device, params), flags_of(params)
    assert flags.sampled and not flags.top_k
    want = sample_ref(logits.clone(), positions, batch, flags)
    assert torch.equal(in_turn(logits, positions, batch, flags, 2), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_tokens_cannot_be_sampled(rank: int, device: torch.device) -> None:
    """All logits of a rank are -inf, or a few of them are not."""
    logits = make_scene("normal", 2, 1400, device)
    half = slice(700 * rank, 700 * (rank + 1))
    logits[:, 0, half] = -torch.inf
    logits[:, 1, half][:, 5:] = -torch.inf
    positions, batch, flags = positions_of(logits), make_batch(device, PARAMS), flags_of(PARAMS)
    want = sample_ref(logits.clone(), positions, batch, flags)
    assert torch.equal(in_turn(logits, positions, batch, flags, 2), want)
    assert not ((want[:, 0] >= 700 * rank) & (want[:, 0] < 700 * (rank + 1))).any()


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("top_k", [True, False])
def test_invalid_logits(bad: float, top_k: bool, device: torch.device) -> None:
    params = [p for p in PARAMS if top_k or p.top_k < 1]
    batch, flags = make_batch(device, params), flags_of(params)
    logits = make_scene("normal", 2, 700, device)[: len(params)]
    positions = positions_of(logits)
    want = sample_ref(logits.clone(), positions, batch, flags)
    want[:, 1] = -1
    if bad < 0:
        logits[:, 1] = bad
    else:
        for i in range(len(params)):
            logits[i, 1, i * 700 // len(params)] = bad
    assert torch.equal(in_turn(logits, positions, batch, flags, 2), want)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scene", ["normal", "peaked", "tied", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_real(scene: str, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    """The same as one GPU, to the last token: both score a token with the same operations."""
    logits = make_scene(scene, 16, 151_936, device).to(dtype)
    positions, batch = positions_of(logits), make_batch(device, PARAMS)
    flags = replace(flags_of(PARAMS), min_tokens=True)
    want = sample(logits.clone(), positions, batch, flags)

    def work(comm: Communicator) -> Tensor:
        part = VocabShard.of(logits.shape[-1], comm)
        own = logits[..., part.first : part.first + part.count].clone()
        return sample_across(own, part, positions, batch, flags, comm)

    for got in on_ranks(ranks, work):
        assert torch.equal(got, want)
