"""Filters compared with transformers' logits warpers and with a plain sort."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forerun.sampling.filters import filtered_weights, gaps
from tests.property_examples import examples


def weights_of(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """The same parameters for every row of [R, V]."""
    rows = logits.shape[0]
    return filtered_weights(
        gaps(logits),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


def transformers_probabilities(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    return warpers(ids, logits.clone()).softmax(-1)  # type: ignore[arg-type]


def sorted_oracle(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """Kept ids of one row by definition: stable sort, sums in float64, lower ids first."""
    peak = max(row)
    weights = [math.exp((x - peak) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    order = order[:top_k] if top_k > 0 else order
    if top_p < 1:
        total, before, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            if before >= top_p * total:
                break
            kept.append(i)
            before += weights[i]
        order = kept
    return {i for i in order if weights[i] >= min_p}


@pytest.mark.parametrize("vocabulary", [7, 500, 6144])
@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 1.7])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (-1, 1.0, 0.0),
        (5, 1.0, 0.0),
        (-1, 0.9, 0.0),
        (-1, 0.05, 0.0),
        (-1, 1.0, 0.1),
        (5, 0.9, 0.0),
        (40, 0.95, 0.02),
        (-1, 0.5, 0.4),
        (3, 1.0, 1.0),
        (10**6, 0.999, 0.001),
    ],
)
def test_equal_to_transformers(
    vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(8, vocabulary, generator=generator) * 3
    weights = weights_of(logits, temperature, top_k, top_p, min_p)
    expected = transformers_probabilities(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected)


# Values are multiples of 1/4, so that ties are everywhere, at the edges too.
coarse = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=40)


@examples(300)
@given(
    coarse,
    st.sampled_from([0.5, 1.0, 1.5]),
    st.sampled_from([-1, 1, 2, 3, 5, 8, 39, 40, 41]),
    st.sampled_from([0.013, 0.21, 0.37, 0.513, 0.77, 0.913, 0.9987, 1.0]),
    st.sampled_from([0.0, 0.031, 0.33, 1.0]),
)
def test_ties_go_to_the_lower_token_id(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    weights = weights_of(torch.tensor([row]), temperature, top_k, top_p, min_p)[0]
    kept = set(weights.nonzero().flatten().tolist())
    assert kept == sorted_oracle(row, temperature, top_k, top_p, min_p)


def test_ties_with_negative_zero_go_to_the_lower_token_id() -> None:
    flat = torch.zeros(1, 10)
    flat[0, 3] = -0.0
    assert weights_of(flat, 1.0, 4, 1.0, 0.0).tolist() == [[1.0] * 4 + [0.0] * 6]
    assert weights_of(flat, 1.0, -1, 0.55, 0.0).tolist() == [[1.0] * 6 + [0.0] * 4]
    assert weights_of(flat, 1.0, 8, 0.55, 0.0).tolist() == [[1.0] * 5 + [0.0] * 5]  # of 8: 4.4


def test_top_k_is_exact_among_bfloat16_ties() -> None:
    logits = torch.randn(6, 6144, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for k in (1, 50, 777, 6143):
        weights = weights_of(logits, 1.0, k, 1.0, 0.0)
        assert ((weights > 0).sum(-1) == k).all()
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        assert (weights.gather(1, order[:, :k]) > 0).all()


@pytest.mark.parametrize("vocabulary", [1, 50, 6144])
def test_rows_without_filters_are_exact_in_a_batch_with_filters(vocabulary: int) -> None:
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(2)) * 20
    logits[:, ::7] = -torch.inf  # weight 0
    logits[:, 0] = 1.0
    gap, temperature = gaps(logits), torch.full((5,), 0.7)
    plain = filtered_weights(gap, temperature)
    mixed = filtered_weights(
        gap,
        temperature,
        torch.tensor([-1, 3, -1, -1, 3]),
        torch.tensor([1.0, 1.0, 0.5, 1.0, 0.5]),
        torch.tensor([0.0, 0.0, 0.0, 0.2, 0.2]),
    )
    assert torch.equal(mixed[0], plain[0])
    for row, (k, p, m) in enumerate([(3, 1.0, 0.0), (-1, 0.5, 0.0), (-1, 1.0, 0.2)], start=1):
        single = weights_of(logits[row : row + 1], 0.7, k, p, m)
        assert torch.equal(mixed[row : row + 1], single)
    assert (mixed[1:] > 0).any(-1).all()
    assert torch.equal(gap, gaps(logits))  # untouched


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1.0, 1e6, 3e38])
def test_extreme_temperatures_and_top_p_keep_the_best_token(temperature: float) -> None:
    logits = torch.tensor([[-80.0, 3.0, 90.0, 90.0, -torch.inf]])
    for top_p, min_p in ((1.0, 0.0), (1e-30, 0.0), (1.0, 1.0), (0.999999, 0.999999)):
        weights = weights_of(logits, temperature, -1, top_p, min_p)
        assert weights.isfinite().all()
        assert weights[0, 2] == 1.0
        assert weights[0, 4] == 0.0


def test_leading_dimensions_broadcast() -> None:
    logits = torch.randn(3, 4, 100, generator=torch.Generator().manual_seed(3))
    k, p = torch.tensor([5, -1, 20]), torch.tensor([0.9, 0.5, 1.0])
    m, t = torch.tensor([0.0, 0.01, 0.1]), torch.tensor([0.5, 1.0, 2.0])
    whole = filtered_weights(gaps(logits), t[:, None], k[:, None], p[:, None], m[:, None])
    for b in range(3):
        part = weights_of(logits[b], float(t[b]), int(k[b]), float(p[b]), float(m[b]))
        assert torch.equal(whole[b], part)
