"""The sampling kernels against the reference sampler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.kernels.sampling import candidates
from forerun.kernels.sampling.params import SamplingBatch
from forerun.kernels.sampling.sample import mask_stop_tokens, sample_tokens
from forerun.sampling.noise import log1m_uniform, noise_bits
from forerun.sampling.sampler import SamplingFlags, sample, sample_ref
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


def make_requests(params: list[SamplingParams]) -> list[Request]:
    return [
        Request("r", tuple(range(3)), p, 17 * i - 3, frozenset((5, 6, 40 + i)))
        for i, p in enumerate(params)
    ]


def flags_of(params: list[SamplingParams]) -> SamplingFlags:
    return SamplingFlags.of(request.sampling for request in make_requests(params))


def make_batch(device: torch.device, params: list[SamplingParams] = PARAMS) -> SamplingBatch:
    requests = make_requests(params)
    table = SamplingTable(len(requests), device)
    table.set(range(len(requests)), [r.sampling for r in requests])
    return table.gather(torch.arange(len(requests), device=device))


def check(logits: Tensor, slack: float = 0.0) -> None:
    """logits [B, W, V]. `slack`: the share of rows that may differ because of a rounding."""
    size, num_tokens, _ = logits.shape
    device = logits.device
    batch = make_batch(device)
    positions = torch.arange(size * num_tokens, device=device).view(size, num_tokens) % 23
    want = sample_ref(logits.clone(), positions, batch, ALL)
    flat, at = logits.flatten(0, 1), positions.flatten()
    mask_stop_tokens(flat, at, batch)
    got = sample_tokens(flat, at, batch)
    wrong = (got.view(size, num_tokens) != want).nonzero().tolist()
    assert len(wrong) <= slack * size * num_tokens, wrong


# 2200 logits have more than 10 groups, so that candidates are gathered from some of them.
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("vocab", [97, 2200])
@pytest.mark.parametrize("scene", ["normal", "peaked", "tied", "flat", "near"])
def test_tokens(
    vocab: int, scene: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "MAX_TOP_K_GROUPS", 10)
    monkeypatch.setattr(candidates, "TOP_P_GROUPS", 10)
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
    """The host knows that no request filters: `sample_candidates` is not launched."""
    params = [p for p in PARAMS if p.top_k <= 0 and p.top_p >= 1]
    batch, flags = make_batch(device, params), flags_of(params)
    assert flags.sampled and not flags.top_k and not flags.top_p
    logits = _scene("tied", 2, vocab, torch.float32, device)[: len(params)]
    positions = torch.arange(2 * len(params), device=device).view(-1, 2)
    want = sample_ref(logits.clone(), positions, batch, flags)
    assert torch.equal(sample(logits, positions, batch, flags), want)


def test_greedy_batches_read_no_tables(device: torch.device) -> None:
    """Nothing but the argmax runs."""
    logits = _scene("tied", 2, 97, torch.float32, device)
    positions = torch.zeros(logits.shape[:2], dtype=torch.int32, device=device)
    nothing = torch.empty(0, device=device)
    batch = SamplingBatch(nothing, nothing, nothing)
    tokens = sample(logits, positions, batch, SamplingFlags())
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scene", ["normal", "peaked", "tied", "flat"])
def test_tokens_real(scene: str, dtype: torch.dtype, device: torch.device) -> None:
    check(_scene(scene, 16, 151_936, dtype, device), slack=0.01)


@pytest.mark.parametrize("filtered", [False, True])
def test_noise(filtered: bool, device: torch.device) -> None:
    """Equal logits show the noise itself: the token of the largest noise is sampled."""
    vocab, rows = 3000, 6
    key = torch.tensor([3, -(2**40) - 7, 2**62 + 5], device=device)
    positions = torch.arange(rows, device=device) * 7
    slots = torch.arange(3, device=device)
    floats = torch.tensor([1.0, 1.0, 0.0], device=device).repeat(3, 1)
    ints = torch.stack((key, torch.full_like(key, -1), 0 * key), 1)
    logits = torch.zeros(rows, vocab, device=device)
    batch = SamplingBatch(floats, ints, slots)
    got = sample_tokens(logits, positions, batch, filtered, filtered)
    tokens = torch.arange(vocab, device=device)
    bits = noise_bits(key.repeat_interleave(2), positions, tokens)
    want = log1m_uniform(bits).argmax(-1)
    assert torch.equal(got, want)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("vocab", [97, 2200])
def test_invalid_logits(vocab: int, bad: float, device: torch.device) -> None:
    """A NaN or +inf anywhere, or a row of -inf, gives -1 for that row, whatever its parameters."""
    logits = _scene("normal", 2, vocab, torch.float32, device)
    positions = torch.arange(logits[..., 0].numel(), device=device).view(logits.shape[:2])
    batch = make_batch(device)
    plain = [p for p in PARAMS if p.top_k <= 0 and p.top_p >= 1]
    for flags, size in ((ALL, len(PARAMS)), (flags_of(plain), len(plain))):
        used = batch if size == len(PARAMS) else make_batch(device, plain)
        want = sample_ref(logits[:size].clone(), positions[:size], used, flags)
        assert bool((want >= 0).all())
        broken = logits[:size].clone()
        if bad < 0:
            broken[:, 1] = bad
        else:
            for i in range(size):
                broken[i, 1, i * vocab // size] = bad
        want[:, 1] = -1
        assert torch.equal(sample_ref(broken.clone(), positions[:size], used, flags), want)
        assert torch.equal(sample(broken.clone(), positions[:size], used, flags), want)
        draft = sample(broken.clone(), positions[:size], used, flags, invalid=0)
        assert torch.equal(draft, want.clamp_min(0))
