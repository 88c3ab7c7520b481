"""Recorded calls run again on the same tensors; a step's small kernels equal their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun.kernels.attention.paged_kv import compute_kv_slots_ref
from forerun.kernels.cpu import gemm, library, norm, step
from forerun.kernels.cpu.graph import CpuGraph, NotRecordable
from forerun.kernels.speculation.accept import SlotState, accept_commit_ref
from forerun.kernels.speculation.decode_inputs import build_decode_inputs_ref
from forerun.kernels.speculation.ring_buffer import ring_buffer_read_ref, ring_buffer_write_ref
from forerun.kernels.speculation.verify_inputs import build_verify_inputs_ref

pytestmark = [
    pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("with_cpu_kernels"),
]


def test_a_replay_computes_again_what_was_recorded() -> None:
    torch.manual_seed(0)
    first, second = gemm.pack(torch.randn(40, 24)), gemm.pack(torch.randn(24, 20))
    weight, counts = torch.rand(24), torch.zeros(3)

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = gemm.gemm_silu_mul(x, first)  # 20 values
        both = gemm.gemm_add_rms_norm(hidden, second, x, weight, 1e-5)
        half = torch.chunk(both[0], 2, 1)[1] * 2  # a view, then an operation of PyTorch
        counts.add_(half.sum(1))  # in place, on a tensor from outside
        low, _ = half.topk(3)
        return norm.rms_norm(both[1], weight, 1e-5), low

    x = torch.randn(3, 24)
    graph, out = CpuGraph.record(lambda: body(x))
    assert graph.num_parts == 6  # kernels, product, sum, addition, top-k, kernel
    assert graph.nbytes > 0
    for _ in range(2):
        x.copy_(torch.randn(3, 24))
        counts.zero_()
        want, seen = body(x), counts.clone()
        counts.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))
        assert torch.equal(counts, seen)


def test_pools_that_a_step_reads_are_not_its_memory() -> None:
    pool, made = torch.randn(1000, 8), torch.empty(0)

    def body() -> torch.Tensor:
        nonlocal made
        made = torch.empty(4, 8)
        return made.copy_(pool[2:].view(-1, 8)[:4]) + 1

    graph, out = CpuGraph.record(body)
    assert graph.nbytes == made.nbytes + out.nbytes


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: int(x[0]),
        lambda x: bool(x[0]),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x[x > 0.5],
        lambda x: x.nonzero(),
    ],
)
def test_reading_on_the_host_is_refused(read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(NotRecordable):
        CpuGraph.record(lambda: read(torch.ones(3)))
    assert torch.ones(3).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_matrices_are_concatenated_by_kernels(dim: int) -> None:
    x = torch.randn(3, 8)
    graph, out = CpuGraph.record(lambda: torch.cat([x[:, :4], x[:, 4:]], dim))
    assert graph.num_parts == 1
    x.copy_(torch.randn(3, 8))
    graph.replay()
    assert torch.equal(out, torch.cat([x[:, :4], x[:, 4:]], dim))


@pytest.mark.parametrize("shape", [(3,), (3, 8), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_columns_are_stacked_by_kernels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def draw() -> torch.Tensor:
        return torch.randint(-99, 99, (2, *shape)).to(dtype)

    x = draw()
    graph, out = CpuGraph.record(lambda: torch.stack([x[0], x[1], x[0]], 1))
    assert graph.num_parts == 1
    x.copy_(draw())
    graph.replay()
    assert torch.equal(out, torch.stack([x[0], x[1], x[0]], 1))


def test_what_has_no_elements_is_not_run_again() -> None:
    graph, out = CpuGraph.record(lambda: torch.zeros(2, 0) + 1)
    assert graph.num_parts == 0 and out.shape == (2, 0)


def test_a_kernel_is_called_at_once_after_recording() -> None:
    w, x = gemm.pack(torch.eye(8)), torch.randn(2, 8)
    graph, out = CpuGraph.record(lambda: gemm.gemm(x, w))
    assert graph.num_parts == 1
    assert torch.equal(gemm.gemm(x, w), out)


SLOTS = torch.tensor([3, 0, 4])  # 4: the padding slot


def tables(width: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(width)
    return {
        "kv_len": torch.tensor([7, 0, 30, 15, 0], dtype=torch.int32),
        "last_token": torch.randint(0, 90, (5,), generator=draw),
        "page_table": torch.randint(1, 99, (5, 12), generator=draw).int(),
        "history": torch.zeros(5, 60, dtype=torch.int32),
        "draft_limit": torch.tensor([2, 0, 9, 1, 9], dtype=torch.int32),
        "drafts": torch.randint(-3, 100, (3, width + 4), generator=draw)[:, : width - 1],
        "sampled": torch.randint(-1, 3, (3, width), generator=draw),
    }


@pytest.mark.parametrize("width", [1, 2, 9])
def test_inputs_equal_their_references(width: int) -> None:
    t = tables(width)
    of_slots = SLOTS, t["kv_len"], t["last_token"], t["page_table"], width, 4
    want: Any = build_decode_inputs_ref(*of_slots, 40)
    got = step.decode_inputs(*of_slots, 10)
    for a, b in zip(got, vars(want).values(), strict=True):
        torch.testing.assert_close(a, b)
    depth = (torch.arange(12).view(1, -1).expand(3, -1)[:, : width - 1] % 3 + 1).int()
    for each in (None, depth):
        given = t["last_token"][SLOTS], t["drafts"], SLOTS, t["draft_limit"], each, 90
        for a, b in zip(step.verify_inputs(*given), build_verify_inputs_ref(*given), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("width", [1, 2, 9])
def test_accept_commit_equals_its_reference(width: int, given: bool) -> None:
    t = tables(width)
    sampled, start = t["sampled"], t["kv_len"][SLOTS]
    candidates = sampled[:, :-1].clone()
    candidates[0, 1:2], candidates[1, 3:4] = 7, -1
    count = torch.tensor([1, width, 1], dtype=torch.int32) if given else None
    states = []
    for run in (accept_commit_ref, step.accept_commit):
        state = SlotState(*(t[name].clone() for name in ("kv_len", "last_token", "history")))
        tensors = state.kv_len, state.last_token, state.history
        kept: Any = state if run is accept_commit_ref else tensors
        states.append((*run(candidates, sampled, SLOTS, start, kept, count), *tensors))
    for a, b in zip(*states, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_ring_buffers(dtype: torch.dtype) -> None:
    table, ids = torch.randn(9, 6).to(dtype), torch.tensor([8, 0, 3, 3])
    assert torch.equal(step.take_rows(table, ids), table[ids])
    buffers = torch.zeros(2, 5, 4, 6, dtype=dtype).unbind()
    positions, values = torch.tensor([2, 9, 7], dtype=torch.int32), torch.randn(3, 6).to(dtype)
    step.ring_write(buffers[0], SLOTS, positions, values)
    ring_buffer_write_ref(buffers[1], SLOTS, positions, values)
    assert torch.equal(*buffers) and buffers[0].any()
    at, empty = torch.arange(15).view(3, 5) + 2, torch.arange(15).view(3, 5) % 4 == 1
    read = step.ring_read(buffers[0], SLOTS, at, empty)
    assert torch.equal(read, ring_buffer_read_ref(buffers[0], SLOTS, at, empty)) and read.any()


@pytest.mark.parametrize("width", [1, 9])
def test_kv_slots_equal_their_reference(width: int) -> None:
    table = torch.randperm(30).view(3, 10).int()[:, :8]
    start = torch.tensor([0, 5, 14], dtype=torch.int32)
    want = compute_kv_slots_ref(table, start, None, width, 3 * width, 4)
    assert torch.equal(step.kv_slots(table, start, width, 4), want)
