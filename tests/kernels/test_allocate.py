"""Dividing verified tokens among requests: against every division there is, and its kernel."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import Tensor

from forerun.speculative.ragged.allocate import LARGEST_TILE, allocate, allocate_ref
from tests.property_examples import examples

# Of each draft, given those before it; with many equal ones, 0, 1 and values close to each other.
RATES = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.9, 0.90000004, 1.0]) | st.floats(0, 1, width=32)
SETTINGS = examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def survivals(draw: st.DrawFn, requests: int = 4, drafts: int = 4) -> Tensor:
    """[B, K] float32, products of rates along each row."""
    batch, count = draw(st.integers(1, requests)), draw(st.integers(1, drafts))
    rates = draw(st.lists(RATES, min_size=batch * count, max_size=batch * count))
    return torch.tensor(rates, dtype=torch.float32).view(batch, count).cumprod(1)


def promised(survival: Tensor, widths: list[int]) -> float:
    """Drafts that a pass of these widths is expected to accept."""
    rows = zip(survival.double().tolist(), widths, strict=True)
    return sum(sum(row[: width - 1]) for row, width in rows)


@SETTINGS
@given(survival=survivals(), total=st.integers(0, 24))
@example(survival=torch.zeros(3, 2), total=5)
@example(survival=torch.ones(3, 2), total=5)
def test_no_other_division_promises_more(survival: Tensor, total: int) -> None:
    batch, count = survival.shape
    widths = allocate_ref(survival, total).tolist()
    size = min(max(total, batch), batch * (count + 1))
    assert sum(widths) == size and all(1 <= width <= count + 1 for width in widths)
    every = product(range(1, count + 2), repeat=batch)
    best = max(promised(survival, list(each)) for each in every if sum(each) == size)
    assert promised(survival, widths) == pytest.approx(best, rel=1e-12)


@SETTINGS
@given(survival=survivals(), total=st.integers(1, 20))
def test_one_token_more_lengthens_one_prefix(survival: Tensor, total: int) -> None:
    before, after = allocate_ref(survival, total), allocate_ref(survival, total + 1)
    assert (after >= before).all() and (after - before).sum() <= 1


@SETTINGS
@given(survival=survivals(7, 9), total=st.integers(0, 80))
def test_the_kernel_divides_as_its_reference(
    survival: Tensor, total: int, each_device: torch.device
) -> None:
    got = allocate(survival.to(each_device), total)
    assert got.dtype == torch.int32
    assert got.tolist() == allocate_ref(survival, total).tolist()


@pytest.mark.parametrize(("batch", "drafts"), [(1, 15), (33, 7), (64, 15), (256, 15), (5, 1)])
def test_sizes_of_engines(batch: int, drafts: int, each_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    rates = torch.rand(batch, drafts, generator=generator).sqrt()
    survival = rates.cumprod(1)
    survival[batch // 2] = 0.0  # the padding slot, or a request without drafts
    for total in (batch, batch + 1, 2 * batch, 3 * batch + 1, batch * drafts, 10**6):
        want = allocate_ref(survival, total)
        assert torch.equal(allocate(survival.to(each_device), total).cpu(), want)


def test_equal_survivals_go_by_position_then_by_request(each_device: torch.device) -> None:
    survival = torch.full((3, 2), 0.5, device=each_device)
    widths = [allocate(survival, total).tolist() for total in range(3, 10)]
    assert widths[:4] == [[1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]
    assert widths[4:] == [[3, 2, 2], [3, 3, 2], [3, 3, 3]]


def test_what_is_no_probability(each_device: torch.device) -> None:
    """NaN and what is negative count as 0, more than 1 as 1; other rows stay as they are."""
    rows = [[torch.nan, torch.nan], [7.0, 0.25], [-1.0, -torch.inf], [1.0, 0.5]]
    survival = torch.tensor(rows, device=each_device)
    for total in range(4, 13):
        got = allocate(survival, total).tolist()
        assert got == allocate_ref(survival.cpu(), total).tolist()
    assert allocate(survival, 8).tolist() == [1, 3, 1, 3]
    assert allocate(survival, 6).tolist() == [1, 2, 1, 2]


def test_rows_may_be_strided(each_device: torch.device) -> None:
    wide = torch.rand(4, 12, generator=torch.Generator().manual_seed(1)).cumprod(1)
    part = wide[:, :5]
    assert (
        allocate(part.to(each_device), 13).tolist() == allocate_ref(part.contiguous(), 13).tolist()
    )


def test_more_than_one_cta_can_take(each_device: torch.device) -> None:
    batch = LARGEST_TILE // 8
    survival = torch.rand(batch, 9, generator=torch.Generator().manual_seed(2)).cumprod(1)
    got = allocate(survival.to(each_device), 2 * batch)
    assert int(got.sum()) == 2 * batch and torch.equal(got.cpu(), allocate_ref(survival, 2 * batch))


@pytest.mark.gpu
def test_it_is_captured(device: torch.device) -> None:
    survival = torch.rand(256, 15, device=device).cumprod(1)
    allocate(survival, 768)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        widths = allocate(survival, 768)
    for _ in range(3):
        survival.copy_(torch.rand_like(survival).cumprod(1))
        graph.replay()
        assert torch.equal(widths.cpu(), allocate_ref(survival.cpu(), 768))
