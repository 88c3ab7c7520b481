"""Confidences of drafts, and how often drafts of each are accepted."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.drafting.confidence import confidences, confidences_ref
from forerun.kernels.speculation.reliability import (
    DraftsBySlot,
    count_reliability,
    count_reliability_ref,
)

BINS = 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "more"), [(96, 16), (2500, 256), (2500, 0)])
def test_confidences(size: int, more: int, dtype: torch.dtype, device: torch.device) -> None:
    """The hidden states are rows of a wider tensor."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return values.to(dtype)

    hidden, tokens = draw(3, 8, size)[:, 1:6], draw(3, 5, more) if more else None
    weight, bias = draw(1, size + more) / 8, draw(1)
    got = confidences(hidden, tokens, weight, bias)
    wide = [part.double() for part in (hidden, tokens) if part is not None]
    want = (torch.cat(wide, -1) @ weight[0].double() + bias.double()).sigmoid()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, confidences_ref(hidden, tokens, weight, bias))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("batch", "depth"), [(1, 1), (5, 7), (64, 15)])
def test_reliability(batch: int, depth: int, ragged: bool, device: torch.device) -> None:
    """Against loops over requests and drafts."""
    generator = torch.Generator().manual_seed(batch)

    def draw(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator, dtype=torch.int32)

    rows = batch + 3
    confidence = torch.rand(batch, depth, generator=generator)
    confidence[0, 0] = 1.0
    slots = torch.randperm(rows, generator=generator)[:batch]
    widths = draw(1, depth + 2, batch) if ragged else None
    committed = draw(1, depth + 2, batch)
    floats = torch.rand(rows, 3, generator=generator)
    floats[::2, 0] = 0.0
    limits, padding = draw(0, depth + 1, rows), rows - 1
    want = torch.zeros(2 * BINS, 3, dtype=torch.float64)
    for i, slot in enumerate(slots.tolist()):
        most = min(int(limits[slot]), depth if widths is None else int(widths[i]) - 1)
        for k in range(min(most, int(committed[i])) if slot != padding else 0):
            value = confidence[i, k].double()
            row = want[min(int(value * BINS), BINS - 1) + (BINS if floats[slot, 0] > 0 else 0)]
            row += torch.stack([torch.ones(()), torch.tensor(float(k < committed[i] - 1)), value])
    drafts = DraftsBySlot(limits.to(device), floats.to(device)[:, 0], padding)
    args = (
        confidence.to(device), committed.to(device), slots.to(device), drafts,
        None if widths is None else widths.to(device),
    )  # fmt: skip
    for count in (count_reliability, count_reliability_ref):
        counts = torch.zeros(2 * BINS, 3, dtype=torch.float64, device=device)
        count(counts, *args)
        torch.testing.assert_close(counts.cpu(), want, rtol=1e-12, atol=1e-9)
