"""The keyed noise: its definition in bits, and its statistical quality."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from forerun.sampling.noise import gumbel_argmax, gumbel_scores, log1m_uniform, noise_bits, seed_key
from tests.property_examples import examples

MASK = 0xFFFFFFFF
SEEDS = [*range(40), -1, -2, 42, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1]


def mix(x: int, key: int = 0) -> int:
    """The permutation with Python integers."""
    x ^= x >> 16
    x = x * 0x21F0AAAD & MASK ^ key
    x ^= x >> 15
    x = x * 0x735A2D97 & MASK
    return x ^ x >> 15


def expected_bits(seed: int, position: int, token: int) -> int:
    key = seed_key(seed) & (1 << 64) - 1
    first, second = mix(key & MASK ^ position), mix(key >> 32 ^ position)
    return mix(mix(token) ^ first, second)


def keys(seeds: list[int]) -> Tensor:
    return torch.tensor([seed_key(s) for s in seeds])


def uniforms(bits: Tensor) -> Tensor:
    """Float64, exact."""
    return ((bits.long() & MASK).double() + 0.5) * 2.0**-32


def block(seeds: list[int], positions: range, vocabulary: int) -> Tensor:
    """Bits [seeds, positions, V]."""
    return noise_bits(keys(seeds)[:, None], torch.tensor(list(positions)), torch.arange(vocabulary))


def uniform_p(counts: Tensor) -> float:
    return float(stats.chisquare(counts.numpy()).pvalue)


@examples(200)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_bits_are_those_of_32_bit_integer_arithmetic(seed: int, position: int, token: int) -> None:
    # Many columns, so that the vectorised loops run and not only their remainders.
    tokens = torch.full((37,), token, dtype=torch.int64)
    bits = noise_bits(keys([seed]), torch.tensor([position], dtype=torch.int32), tokens)
    assert bits.shape == (1, 37)
    assert (bits & MASK).eq(expected_bits(seed, position, token)).all()


def test_seed_key_is_splitmix64() -> None:
    # The first outputs of the generator's published test vector for state 1234567.
    weyl, state = 0x9E3779B97F4A7C15, 1234567
    outputs = [seed_key(state + i * weyl) & (1 << 64) - 1 for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_depends_on_nothing_but_seed_position_and_token() -> None:
    whole = block(SEEDS, range(90, 110), 300)
    for row in (0, 7, len(SEEDS) - 1):
        for column in (0, 3, 19):
            alone = noise_bits(keys(SEEDS)[row], torch.tensor(90 + column), torch.arange(5, 300))
            assert torch.equal(alone, whole[row, column, 5:])


def test_exponential_noise_is_finite_positive_and_fine_near_zero() -> None:
    words = torch.tensor([0, 1, 2, 2**24 - 1, 2**31 - 1, -(2**31), -2, -1], dtype=torch.int32)
    noise = -log1m_uniform(words)
    assert noise.dtype == torch.float32
    expected = [-math.log1p(-float(u)) for u in uniforms(words)]
    expected[-2:] = [24 * math.log(2)] * 2  # u would round to 1: the largest float below it
    torch.testing.assert_close(noise.double(), torch.tensor(expected, dtype=torch.float64))
    assert noise[:3].tolist() == [2.0**-33, 3 * 2.0**-33, 5 * 2.0**-33]


def test_bits_are_uniform_down_to_the_rare_ones() -> None:
    bits = block(SEEDS, range(32), 1024).flatten()  # 1.6 million
    for shift in (24, 16, 8, 0):  # every byte
        assert uniform_p(torch.bincount((bits >> shift) & 255, minlength=256)) > 1e-4
    # Draws are won near u = 0: octaves [2^-k, 2^-k+1) and the rest below.
    octaves = 16
    u = uniforms(bits)
    counts = [int(((u >= 2.0**-k) & (u < 2.0 ** (1 - k))).sum()) for k in range(1, octaves + 1)]
    counts.append(int((u < 2.0**-octaves).sum()))
    fractions = [2.0**-k for k in range(1, octaves + 1)] + [2.0**-octaves]
    expected = [s * len(u) for s in fractions]
    assert stats.chisquare(counts, expected).pvalue > 1e-4


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
@pytest.mark.parametrize("distance", [1, 2, 16, 255])
def test_neighbours_are_independent(axis: str, distance: int) -> None:
    dimension = ("seed", "position", "token").index(axis)
    sizes = ([512, 10, 120], [10, 512, 120], [40, 30, 512])[dimension]
    bits = block(list(range(sizes[0])), range(sizes[1]), sizes[2])
    count = bits.shape[dimension] - distance
    a = bits.narrow(dimension, 0, count).flatten()
    b = bits.narrow(dimension, distance, count).flatten()
    pairs = ((a >> 28) & 15) * 16 + ((b >> 28) & 15)
    assert uniform_p(torch.bincount(pairs, minlength=256)) > 1e-4
    # Both among the smallest 1/64: where two tokens contend for a draw.
    rare = int(((uniforms(a) < 1 / 64) & (uniforms(b) < 1 / 64)).sum())
    assert stats.binomtest(rare, a.numel(), 1 / 4096).pvalue > 1e-4
    correlation = torch.corrcoef(torch.stack((uniforms(a), uniforms(b))))[0, 1]
    assert abs(float(correlation)) * math.sqrt(a.numel()) < 4.5  # standard deviations


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_every_input_bit_flips_every_output_bit_half_of_the_time(axis: str) -> None:
    samples = 2048
    generator = torch.Generator().manual_seed(5)

    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (samples,), generator=generator)

    base = {"seed": draw(2**62), "position": draw(2**17), "token": draw(2**18)}
    widths = {"seed": 64, "position": 20, "token": 18}

    def hashed(values: dict[str, Tensor]) -> Tensor:
        key = keys(values["seed"].tolist())
        # One token a row: the diagonals of blocks of 32 rows by 32 tokens.
        chunks = (t.split(32) for t in (key, values["position"], values["token"]))
        return torch.cat([noise_bits(*chunk).diagonal() for chunk in zip(*chunks, strict=True)])

    before = hashed(base)
    outputs = torch.arange(32, dtype=torch.int32)
    worst = 0.0
    for bit in range(widths[axis]):
        flip = -(2**63) if bit == 63 else 1 << bit
        changed = before ^ hashed({**base, axis: base[axis] ^ flip})
        rate = ((changed[:, None] >> outputs) & 1).double().mean(0)
        worst = max(worst, float((rate - 0.5).abs().max()))
    # 32 * 64 rates at most, normal: 5 deviations are one in a thousand such tests.
    assert worst < 5 * 0.5 / math.sqrt(samples)


def test_seeds_far_and_near_give_different_noise() -> None:
    first = block(SEEDS, range(2), 8).reshape(len(SEEDS), -1)
    assert len({tuple(row.tolist()) for row in first}) == len(SEEDS)
    # and no two rows share a value at the same place: 2^-32 each
    assert all(len(set(column.tolist())) == len(SEEDS) for column in first.T)


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_gumbel_argmax_samples_from_the_softmax(vary: str) -> None:
    samples = 40_000
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], dtype=torch.float64)
    logits = probabilities.log().float().expand(samples, -1)
    if vary == "seed":
        sampled = gumbel_argmax(logits, keys(list(range(samples))), torch.tensor(17))
    else:
        sampled = gumbel_argmax(logits, keys([3]), torch.arange(samples))
    counts = torch.bincount(sampled, minlength=6)
    assert stats.chisquare(counts.numpy(), (probabilities * samples).numpy()).pvalue > 1e-4


def test_a_weight_of_zero_never_wins_and_a_pruned_vocabulary_keeps_its_noise() -> None:
    key, positions = keys([9]), torch.arange(500)
    weights = torch.rand(500, 64, generator=torch.Generator().manual_seed(1))
    weights[:, ::3] = 0.0
    weights[:, 1] = 1.0
    scores = gumbel_scores(weights, key, positions)
    assert (weights.gather(1, scores.argmin(-1, keepdim=True)) > 0).all()
    kept = torch.tensor([1, 5, 40, 63])
    pruned = gumbel_scores(weights[:, kept].contiguous(), key, positions, kept)
    assert torch.equal(pruned, scores[:, kept])


@pytest.mark.gpu
def test_cuda_gives_the_same_bits_as_the_cpu() -> None:
    key, positions, tokens = keys(SEEDS)[:, None], torch.arange(33), torch.arange(5003)
    here = noise_bits(key, positions, tokens)
    there = noise_bits(key.cuda(), positions.cuda(), tokens.cuda())
    assert torch.equal(there.cpu(), here)
    torch.testing.assert_close(log1m_uniform(there).cpu(), log1m_uniform(here), rtol=1e-6, atol=0.0)
