"""The sampling kernels draw what the plain PyTorch sampler draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.kernels.sampling import sampling as kernels
from forerun.sampling.noise import log1m_uniform, noise_bits
from forerun.sampling.sampler import SamplingFlags, SamplingRows, sample, sample_ref
from forerun.sampling.table import SamplingTable

ALL = SamplingFlags(sampled=True, top_k=True, top_p=True, min_p=True, min_tokens=True)
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.1, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.5, min_new_tokens=9),
    SamplingParams(temperature=0.0, min_new_tokens=9),
    SamplingParams(temperature=1e-40),
    SamplingParams(temperature=1.2, top_k=300, top_p=0.7),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=0.5),
]


def rules(device: torch.device, params: list[SamplingParams] = PARAMS) -> SamplingRows:
    requests = [
        Request("r", tuple(range(3)), p, 17 * i - 3, frozenset((5, 6, 40 + i)))
        for i, p in enumerate(params)
    ]
    table = SamplingTable(len(requests), device)
    table.set(range(len(requests)), [r.sampling for r in requests])
    return table.gather(torch.arange(len(requests), device=device))


def check(logits: Tensor, slack: float = 0.0) -> None:
    """logits [B, W, V]. `slack`: the share of rows that may differ: a rounding decided a race."""
    batch, width, _ = logits.shape
    device = logits.device
    rows = rules(device)
    positions = torch.arange(batch * width, device=device).view(batch, width) % 23
    want = sample_ref(logits.clone(), positions, rows, ALL)
    flat, at = logits.flatten(0, 1), positions.flatten()
    kernels.mask_stop_tokens(flat, at, rows.slots, rows.ints)
    got = kernels.sample_rows(flat, at, rows.slots, rows.floats, rows.ints)
    wrong = (got.view(batch, width) != want).nonzero().tolist()
    assert len(wrong) <= slack * batch * width, wrong


# 2200 columns are more than FEW groups hold, so that candidates are picked out of blocks.
@pytest.mark.parametrize("vocab", [97, 2200])
@pytest.mark.parametrize("scene", ["normal", "peaked", "tied", "flat", "near"])
def test_tokens(
    vocab: int, scene: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "FEW", 10)
    monkeypatch.setattr(kernels, "FEW_MASS", 10)
    check(_scene(scene, 1, vocab, torch.float32, device))


def _scene(name: str, width: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(PARAMS), width, vocab, generator=generator)
    if name == "peaked":
        x = 4 * x
    elif name == "tied":
        x = (2 * x).round() / 2
    elif name == "flat":
        x = torch.zeros_like(x)
    elif name == "near":  # gaps too small for the bins of top-p
        x = 1e-12 * x
    return x.to(device, dtype)


@pytest.mark.parametrize("vocab", [97, 2200])
def test_without_top_k_and_top_p(vocab: int, device: torch.device) -> None:
    """The host says that padding_slot filters: no row is looked at on its own."""
    params = [p for p in PARAMS if p.top_k <= 0 and p.top_p >= 1]
    rows, flags = rules(device, params), SamplingFlags.of(params)
    assert flags.sampled and not flags.top_k and not flags.top_p
    logits = _scene("tied", 2, vocab, torch.float32, device)[: len(params)]
    positions = torch.arange(2 * len(params), device=device).view(-1, 2)
    want = sample_ref(logits.clone(), positions, rows, flags)
    assert torch.equal(sample(logits, positions, rows, flags), want)


def test_greedy_rows_cost_no_rules(device: torch.device) -> None:
    """Nothing but the argmax: the tables are not even there."""
    logits = _scene("tied", 2, 97, torch.float32, device)
    positions = torch.zeros(logits.shape[:2], dtype=torch.int32, device=device)
    nothing = torch.empty(0, device=device)
    drawn = sample(logits, positions, SamplingRows(nothing, nothing, nothing), SamplingFlags())
    assert torch.equal(drawn, logits.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scene", ["normal", "peaked", "tied", "flat"])
def test_tokens_real(scene: str, dtype: torch.dtype, device: torch.device) -> None:
    check(_scene(scene, 16, 151_936, dtype, device), slack=0.01)


@pytest.mark.parametrize("filtered", [False, True])
def test_noise(filtered: bool, device: torch.device) -> None:
    """A race between equals shows the noise itself: the winner is the largest noise."""
    vocab, rows = 3000, 6
    key = torch.tensor([3, -(2**40) - 7, 2**62 + 5], device=device)
    positions = torch.arange(rows, device=device) * 7
    slots = torch.arange(3, device=device)
    floats = torch.tensor([1.0, 1.0, 0.0], device=device).repeat(3, 1)
    ints = torch.stack((key, torch.full_like(key, -1), 0 * key), 1)
    logits = torch.zeros(rows, vocab, device=device)
    got = kernels.sample_rows(logits, positions, slots, floats, ints, filtered, filtered)
    tokens = torch.arange(vocab, device=device)
    bits = noise_bits(key.repeat_interleave(2), positions, tokens)
    want = log1m_uniform(bits).argmax(-1)
    assert torch.equal(got, want)
