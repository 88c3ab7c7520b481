"""A step's tokens in pinned memory: the kernel and its reference, and which row the host reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.executor.graphs.host_results import RING, HostResults
from forerun.executor.step.inputs import DecodeOutput
from forerun.kernels.speculation.host_results import store_results, store_results_ref


@pytest.mark.parametrize("store", [store_results, store_results_ref])
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (3, 5), (32, 16)])
def test_a_step_is_written_to_the_next_row(
    store: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    batch: int,
    width: int,
    device: torch.device,
) -> None:
    if store is store_results_ref and device.type == "cuda":
        pytest.skip("the reference writes where it computes")
    sampled = torch.arange(batch * width, device=device).view(batch, width) - 1
    committed = torch.arange(batch, dtype=torch.int32, device=device) + 1
    ring = torch.full((4, batch * (width + 1)), -7, pin_memory=device.type == "cuda")
    count = torch.tensor([6], device=device)
    store(sampled, committed, count, ring)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert count.tolist() == [7]
    assert ring[2].tolist() == sampled.flatten().tolist() + committed.tolist()
    assert (ring[[0, 1, 3]] == -7).all()


@pytest.mark.parametrize("trees", [False, True])
def test_widths_of_a_ragged_step_come_along(trees: bool, device: torch.device) -> None:
    results = HostResults(2, 3, device, trees, ragged=True)
    sampled = torch.arange(6, device=device).view(2, 3)
    path = sampled + 10 if trees else None
    widths, committed = torch.tensor([[3, 1], [2, 1]], dtype=torch.int32, device=device)
    results.store(DecodeOutput(sampled, committed, path=path, widths=widths))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    out = results.replayed(2)
    assert out.widths is not None and out.widths.tolist() == [3, 1]
    assert out.sampled.tolist() == sampled.tolist() and out.num_committed.tolist() == [2, 1]
    assert out.path is None if path is None else out.path.tolist() == path.tolist()


def test_the_host_reads_the_rows_in_the_order_of_the_replays(device: torch.device) -> None:
    results = HostResults(2, 3, device)
    committed = torch.tensor([2, 3], dtype=torch.int32, device=device)

    def store(first: int) -> None:
        sampled = torch.arange(6, device=device).view(2, 3) + first
        results.store(DecodeOutput(sampled, committed))

    store(50)  # a warm-up
    results.reset()
    for step in range(0, RING + 2, 2):  # two steps in flight
        store(100 * step)
        first = results.replayed(2)
        store(100 * step + 10)
        second = results.replayed(1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        assert first.sampled.tolist() == (torch.arange(6).view(2, 3) + 100 * step).tolist()
        assert first.num_committed.tolist() == [2, 3] and first.path is None
        assert second.sampled.tolist() == [[100 * step + 10 + i for i in range(3)]]
        assert second.num_committed.tolist() == [2]


def test_the_paths_of_trees_come_with_their_tokens(device: torch.device) -> None:
    results = HostResults(2, 3, device, trees=True)
    sampled, path = torch.arange(12, device=device).view(2, 2, 3).unbind()
    committed = torch.tensor([2, 3], dtype=torch.int32, device=device)
    results.store(DecodeOutput(sampled, committed, path=path))
    got = results.replayed(2)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert got.path is not None and got.path.tolist() == path.tolist()
    assert got.sampled.tolist() == sampled.tolist() and got.num_committed.tolist() == [2, 3]
