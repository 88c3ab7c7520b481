"""Every number is read: kernel against reference."""

from __future__ import annotations

import pytest
import torch

from forerun_bench.stream import CHUNK, read_sums, read_sums_ref

pytest.importorskip("triton")


def test_sums_of_chunks(device: torch.device) -> None:
    x = torch.randint(-8, 9, (3 * CHUNK,), generator=torch.Generator().manual_seed(1))
    x = x.float().to(device)  # small integers: any order of adding is exact
    assert read_sums(x).tolist() == read_sums_ref(x).tolist()
    assert read_sums_ref(x).tolist() == [c.sum().item() for c in x.split(CHUNK)]
