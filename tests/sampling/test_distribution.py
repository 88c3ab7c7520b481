"""Speculation follows the target's distribution exactly, and a wrong accept rule is detected.

A toy target over 4 tokens, second order, writes texts of 3 tokens: 64 outcomes of known
probability. Thousands of seeds, in one batch, run the loop propose → verify → accept → commit with
a draft that is deterministic and mostly wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.kernels.sampling.params import SamplingBatch
from forerun.kernels.speculation.accept import count_committed
from forerun.sampling.filters import filtered_weights, gaps
from forerun.sampling.sampler import SamplingFlags, sample
from forerun.sampling.table import SamplingTable

V, LENGTH, PROMPT = 4, 3, 2
Rule = Callable[[Tensor, Tensor, Tensor], Tensor]  # draft, sampled, logits -> num_committed [B]

PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.8, top_k=3, top_p=0.85)
SEEDS = {PLAIN: 8_000, FILTERED: 1_000}  # each in one batch; filters are slow on so many rows


def target_logits() -> Tensor:
    """[V, V, V]: by the token before last, the last one, the next one."""
    return torch.randn(V, V, V, generator=torch.Generator().manual_seed(11)) * 1.2


def batch_for(params: SamplingParams) -> SamplingBatch:
    seeds = range(SEEDS[params])
    table = SamplingTable(len(seeds), torch.device("cpu"))
    batch = [Request("r", (0,) * PROMPT, params, seed, frozenset()) for seed in seeds]
    table.set(seeds, [r.sampling for r in batch])
    return table.gather(torch.arange(len(seeds)))


def lossless(draft: Tensor, sampled: Tensor, logits: Tensor) -> Tensor:
    return count_committed(draft, sampled)


def any_possible(draft: Tensor, sampled: Tensor, logits: Tensor) -> Tensor:
    """Broken: takes every draft that the target could have sampled."""
    possible = logits[:, :-1].softmax(-1).gather(-1, draft[..., None])[..., 0] > 0
    return possible.int().cumprod(-1).sum(-1) + 1


def one_too_many(draft: Tensor, sampled: Tensor, logits: Tensor) -> Tensor:
    """Broken: counts the first disagreement as accepted."""
    return (count_committed(draft, sampled) + 1).clamp_max(sampled.shape[1])


def shifted(draft: Tensor, sampled: Tensor, logits: Tensor) -> Tensor:
    """Broken: compares with the next position."""
    return (draft == sampled[:, 1:]).int().cumprod(-1).sum(-1) + 1


def run(params: SamplingParams, num_tokens: int, rule: Rule, frozen_noise: bool = False) -> Tensor:
    """Texts [seeds, LENGTH]. `frozen_noise` keys all tokens of a step by the first position."""
    table, requests = target_logits(), batch_for(params)
    flags = SamplingFlags.of([Request("r", (0,), params, 0, frozenset()).sampling])
    seeds = SEEDS[params]
    tokens = torch.zeros(seeds, PROMPT + LENGTH + num_tokens, dtype=torch.int64)
    length = torch.full((seeds, 1), PROMPT)
    for _ in range(LENGTH):  # every step commits at least one
        offsets = torch.arange(num_tokens)
        window = tokens.gather(1, length - 2 + torch.arange(2))
        # The draft: any function of the known tokens.
        draft = (window[:, :1] * 5 + window[:, 1:] * 3 + length + offsets[:-1] ** 2) % V
        known = torch.cat((window, draft), 1)
        logits = table[known[:, :-1], known[:, 1:]]  # [seeds, W, V]
        positions = length + (0 if frozen_noise else 1) * offsets
        sampled = sample(logits, positions.expand(seeds, num_tokens), requests, flags)
        num_committed = rule(draft, sampled, logits)[:, None]
        # Committed: the accepted drafts and the token sampled after them.
        bonus = sampled.gather(1, (num_committed - 1).long())
        drafts = torch.nn.functional.pad(draft, (0, 1))
        committed = torch.where(offsets < num_committed - 1, drafts, bonus)
        tokens.scatter_(1, length + offsets, committed)  # what is past num_committed is overwritten
        length = (length + num_committed).clamp_max(PROMPT + LENGTH)
    return tokens[:, PROMPT : PROMPT + LENGTH]


def exact_probabilities(params: SamplingParams) -> np.ndarray:
    """[64] float64, by the chain rule."""
    size = (V * V,)
    weights = filtered_weights(
        gaps(target_logits().view(V * V, V)),
        torch.full(size, params.temperature),
        torch.full(size, params.top_k),
        torch.full(size, params.top_p),
    )
    p = (weights.double() / weights.double().sum(-1, keepdim=True)).view(V, V, V).numpy()
    out = np.zeros((V, V, V))
    for a, b, c in np.ndindex(V, V, V):
        out[a, b, c] = p[0, 0, a] * p[0, a, b] * p[a, b, c]
    return out.reshape(-1)


def p_value(texts: Tensor, params: SamplingParams) -> float:
    """χ² of the texts against the exact distribution; 0 where an impossible text came out."""
    expected = exact_probabilities(params)
    counts = torch.bincount(texts @ torch.tensor([V * V, V, 1]), minlength=V**3).numpy()
    if counts[expected == 0].any():
        return 0.0
    expected, counts = expected[expected > 0], counts[expected > 0]
    return float(stats.chisquare(counts, expected / expected.sum() * len(texts)).pvalue)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("params", "num_tokens"),
    [(PLAIN, 1), (PLAIN, 2), (PLAIN, 3), (PLAIN, 5), (FILTERED, 3)],
    ids=["plain-1", "plain-2", "plain-3", "plain-5", "filtered-3"],
)
def test_texts_follow_the_target(params: SamplingParams, num_tokens: int) -> None:
    texts = run(params, num_tokens, lossless)
    assert p_value(texts, params) > 1e-4
    assert torch.equal(texts, run(params, 1, lossless))  # the text of plain decoding, seed by seed


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("params", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("rule", [any_possible, one_too_many, shifted])
def test_a_broken_accept_rule_is_detected(params: SamplingParams, rule: Rule) -> None:
    assert p_value(run(params, 3, rule), params) < 1e-6


def test_noise_shared_within_a_step_is_detected() -> None:
    assert p_value(run(PLAIN, 3, lossless, frozen_noise=True), PLAIN) < 1e-6


def test_accept_counts_the_agreeing_prefix() -> None:
    sampled = torch.tensor([[1, 2, 3, 4]] * 5)
    draft = torch.tensor([[1, 2, 3], [1, 2, 9], [9, 2, 3], [1, 9, 3], [2, 3, 4]])
    num_committed = count_committed(draft, sampled)
    assert num_committed.tolist() == [4, 3, 1, 2, 1]
    assert num_committed.dtype == torch.int32
    assert (
        count_committed(torch.empty(3, 0, dtype=torch.int64), torch.ones(3, 1).long()).tolist()
        == [1] * 3
    )
