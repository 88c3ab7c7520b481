"""Top-n-sigma: the formula in NumPy, the kernel against it, and rows that are left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.core.errors import RequestError
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.kernels.sampling.top_n_sigma import keep_top_n_sigma, keep_top_n_sigma_ref
from forerun.sampling.sampler import SamplingFlags

VOCAB = 5003
N = torch.tensor([0.5, 1.0, 2.5, -1.0, 4.0])


def scene() -> Tensor:
    """[B, 3, V]; some logits are masked."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(len(N), 3, VOCAB, generator=generator) * 3 + 7
    logits[1, 0, ::3] = -torch.inf
    logits[2, 1, 5] = -1e4
    logits[4, 2] = 1.5  # no deviation
    return logits


def expected(logits: Tensor) -> list[list[list[bool]]]:
    """Which tokens are kept, by the paper's formula in float64."""
    kept = []
    for request, n in zip(logits.double().numpy(), N.tolist(), strict=True):
        rows = []
        for row in request:
            sigma = np.std(row[np.isfinite(row)])
            bound = row.max() - n * sigma if n > 0 else -np.inf
            rows.append((np.isfinite(row) & (row >= bound - 1e-12)).tolist())
        kept.append(rows)
    return kept


@pytest.mark.parametrize("kernel", [False, True])
def test_the_formula(device: torch.device, kernel: bool) -> None:
    logits = scene()
    where = device if kernel else torch.device("cpu")
    edited = logits.to(where).clone()
    (keep_top_n_sigma if kernel else keep_top_n_sigma_ref)(edited, N.to(where))
    kept = torch.tensor(expected(logits))
    assert torch.equal(edited.cpu() > -torch.inf, kept)
    assert torch.equal(edited.cpu()[kept], logits[kept])  # bit for bit
    assert 0 < int(kept[0].sum()) < int(kept[2].sum()) < kept[2].numel()


def test_rows_do_not_depend_on_the_batch(device: torch.device) -> None:
    logits = scene().to(device)
    whole = logits.clone()
    keep_top_n_sigma(whole, N.to(device))
    for request in range(len(N)):
        for row in range(3):
            alone = logits[request : request + 1, row : row + 1].clone()
            keep_top_n_sigma(alone, N[request : request + 1].to(device))
            assert torch.equal(alone[0, 0], whole[request, row])


@pytest.mark.parametrize("kernel", [False, True])
def test_invalid_rows_stay(device: torch.device, kernel: bool) -> None:
    where = device if kernel else torch.device("cpu")
    logits = torch.arange(4.0).repeat(1, 3, 1)
    logits[0, 0, 1], logits[0, 1, 2], logits[0, 2] = torch.nan, torch.inf, -torch.inf
    edited = logits.to(where).clone()
    (keep_top_n_sigma if kernel else keep_top_n_sigma_ref)(edited, torch.ones(1, device=where))
    torch.testing.assert_close(edited.cpu(), logits, rtol=0, atol=0, equal_nan=True)


def test_only_requests_that_ask_for_it_are_edited() -> None:
    def flags(**params: float) -> SamplingFlags:
        request = Request("r", (1,), SamplingParams(**params), 0, frozenset())  # type: ignore[arg-type]
        return SamplingFlags.of([request.sampling])

    assert flags().edits == () and not flags().penalties
    assert flags(top_n_sigma=1.0).edits == ("top_n_sigma",) and flags(top_n_sigma=1.0).penalties


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), "1", True])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="top_n_sigma must be"):
        SamplingParams.of({"top_n_sigma": value})
