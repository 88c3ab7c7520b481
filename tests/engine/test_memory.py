"""The memory budget, and errors when memory does not suffice."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.executor import attention_setup, build, memory
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.memory import RESERVED_BYTES, KVDemand, MemoryLog, ProfilingRun, kv_budget
from forerun.kvcache.layouts import ModelLayout
from tests.golden_engine import CASES, golden_llm

GPU, GIB = torch.device("cuda", 0), 2**30
LAYOUTS = [
    ModelLayout.dense(36, 8, 128, torch.bfloat16),
    ModelLayout.dense(5, 8, 128, torch.bfloat16),
]
DEMAND = KVDemand(LAYOUTS, 16, max_tokens=10**9, min_tokens=17)
TOKEN_BYTES = DEMAND.token_bytes


def tokens(free: int, total: int, seen: ProfilingRun, monkeypatch: Any, **settings: Any) -> int:
    monkeypatch.setattr(memory, "memory", lambda device: (free, total))
    budget = kv_budget(EngineConfig(**settings), DEMAND, GPU, seen)
    return (budget.num_pages - 1) * 16


def test_mem_fraction_static_applies_if_steps_need_less(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ProfilingRun(activations=2 * GIB, graphs=GIB)
    got = tokens(60 * GIB, 80 * GIB, seen, monkeypatch)
    assert got * TOKEN_BYTES == pytest.approx(48 * GIB, abs=33 * TOKEN_BYTES)  # 60 - 15 % of 80
    more = tokens(60 * GIB, 80 * GIB, seen, monkeypatch, mem_fraction_static=0.9)
    assert (more - got) * TOKEN_BYTES == pytest.approx(4 * GIB, abs=17 * TOKEN_BYTES)


def test_steps_and_graphs_take_precedence_over_the_fraction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = ProfilingRun(activations=12 * GIB, graphs=3 * GIB)
    for fraction in (0.85, 0.95):
        got = tokens(60 * GIB, 80 * GIB, seen, monkeypatch, mem_fraction_static=fraction)
        assert got * TOKEN_BYTES == pytest.approx(45 * GIB - RESERVED_BYTES, abs=33 * TOKEN_BYTES)
    why = (
        r"holds 0 tokens .* raise mem_fraction_static.* Other processes hold 65.0 of cuda:0's 80.0"
    )
    with pytest.raises(ConfigError, match=why):
        tokens(15 * GIB, 80 * GIB, seen, monkeypatch)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 64 * GIB)  # all of it its own
    with pytest.raises(ConfigError) as error:
        tokens(15 * GIB, 80 * GIB, seen, monkeypatch)
    assert "Other processes" not in str(error.value)


def test_the_pools_fit_into_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Including the null page."""
    monkeypatch.setattr(memory, "memory", lambda device: (100 * TOKEN_BYTES * 16 * 2, 2**40))
    config = EngineConfig(mem_fraction_static=0.5)
    budget = kv_budget(config, DEMAND, torch.device("cpu"), ProfilingRun())
    assert budget.num_pages == 100


def test_the_profiling_run_needs_one_page() -> None:
    """Prompts are at most as long as the context; the padding slot is reset."""
    with golden_llm("DFLASH", context_length=64, chunked_prefill_size=200) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        step, padding_slot = executor.step, executor.tables.padding_slot
        plans = list(memory.profiling_plans(llm.engine.limits, (1, 4, 10), padding_slot))
        prompts = [[c.num_tokens for c in plan.prefill] for plan in plans if plan.prefill]
        largest = [64, 64, 64, 8]
        assert prompts == [largest] + 2 * [[1], [8], [16], [32], [64], [64, 64], largest]
        assert max(len(plan.decode) for plan in plans) == llm.engine.limits.slots
        for plan in plans:
            executor.launch(plan).result()
        pages = step.attention.pools.dense.transpose(0, 2).flatten(1).any(1)
        assert pages.nonzero().tolist() == [[0]]
        assert executor.tables.kv_len[padding_slot] == 0
        params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
        out = llm.generate(input_ids=CASES[0]["prompt"], sampling_params=params)
        assert out.output_ids == CASES[0]["output"][:5]


@pytest.mark.parametrize(("prompts", "whole"), [([], 0), ([16], 50), ([16, 32, 64], 50 + 2 * 7)])
@pytest.mark.parametrize(("buckets", "pieces"), [([], 0), ([64], 30), ([32, 48, 64], 30 + 2 * 3)])
def test_graphs_of_shapes_in_between_take_as_much_as_those_of_the_smallest(
    buckets: list[int],
    pieces: int,
    prompts: list[int],
    whole: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of decode steps (two graphs per batch size), of whole prefills, and of those in pieces."""
    estimate = graph_bytes(buckets, [0], monkeypatch, prompts)
    assert estimate == (120 + 3 * 9) + whole + pieces


@pytest.mark.parametrize(
    ("others", "estimates"), [([0], 1), ([90], 1), ([500, 0], 2), ([500, 90, 0], 2), (3 * [500], 3)]
)
def test_memory_of_other_processes_is_not_that_of_graphs(
    others: list[int], estimates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`others`: what another process allocates during each estimate; above 1,000 is unusual."""
    left = list(others)
    assert graph_bytes([], left, monkeypatch) == (120 + 3 * 9) + 3 * others[estimates - 1]
    assert len(others) - len(left) == estimates


def test_ranks_estimate_graphs_as_often_as_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process allocates on one GPU is not seen on the other one."""
    left, of_other_rank = [0, 0, 0], iter([2000, 700, 0])
    estimate = graph_bytes([], left, monkeypatch, largest=lambda own: max(own, next(of_other_rank)))
    assert estimate == 700 and len(left) == 1


def graph_bytes(
    buckets: list[int],
    others: list[int],
    monkeypatch: pytest.MonkeyPatch,
    prompts: Sequence[int] = (),
    largest: Callable[[float], float] = float,
) -> int:
    """The estimate, while another process allocates `others` bytes beside a smallest graph."""
    free = 100_000
    monkeypatch.setattr(memory, "_free", lambda device: free)
    monkeypatch.setattr(memory, "memory", lambda device: (free, 16_000))

    def capture_some(sizes: list[int], whole: list[int], some: list[int], report: Any) -> None:
        nonlocal free
        assert sizes == [1, 8] and some == sorted({*buckets[:1], *buckets[-1:]})
        costs = [100, 20, 5, 4 + others.pop(0)]  # batch size 8, batch size 1
        for cost in (*costs, *[50, 7][: len(whole)], *[30, 3][: len(some)]):
            report("")
            free -= cost

    graphs = SimpleNamespace(
        sizes=[1, 2, 4, 8],
        prompts=prompts,
        piecewise=SimpleNamespace(buckets=buckets),
        capture_some=capture_some,
        clear=lambda: None,
        num_decode=lambda sizes: 2 * len(sizes),
    )
    return memory._graph_bytes(graphs, torch.device("cuda"), largest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_a_one_line_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(attention_setup, "ModelPools", fail)
    with pytest.raises(
        ConfigError, match=r"out of memory for the K/V pools: .* lower mem_frac"
    ) as e:
        golden_llm()
    assert "\n" not in str(e.value)


def test_other_errors_are_not_changed() -> None:
    with (
        pytest.raises(RuntimeError, match="shape"),
        MemoryLog(torch.device("cpu")).stage("weights", "buy"),
    ):
        raise RuntimeError("shape mismatch")


alone = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="other processes allocate memory meanwhile; run without -n",
)


@pytest.mark.gpu
@alone
def test_memory_is_accounted_for() -> None:
    """The memory of the stages adds up to the memory used."""
    free = torch.cuda.mem_get_info()[0]
    with golden_llm("DFLASH", device="cuda", max_running_requests=32) as llm:
        sizes = llm.explain()["memory_bytes"]
        used = sum(sizes[name] for name in sizes if name not in ("activations", "free"))
        torch.cuda.synchronize()
        assert free - sizes["free"] == pytest.approx(used, abs=64 << 20)
        fraction = sizes["free"] / torch.cuda.mem_get_info()[1]
        assert fraction > 0.14  # mem_fraction_static is 0.85


@pytest.mark.gpu
@alone
def test_the_memory_of_graphs_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ProfilingRun] = []

    def spy(*args: Any) -> ProfilingRun:
        seen.append(memory.profile_run(*args))
        return seen[-1]

    monkeypatch.setattr(build, "profile_run", spy)
    with golden_llm("DFLASH", device="cuda", max_running_requests=64) as llm:
        graphs = llm.explain()["memory_bytes"]["graphs"]
    assert graphs - RESERVED_BYTES < seen[0].graphs < 2 * graphs + RESERVED_BYTES


@pytest.mark.gpu
def test_out_of_memory_on_a_gpu_is_a_config_error() -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-5)
    try:
        with pytest.raises(ConfigError, match=r"cuda:0 ran out of memory for the"):
            golden_llm("DFLASH", device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
