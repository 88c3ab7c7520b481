"""Threads of an operation on a CPU: what is chosen, where it applies, and that texts are equal."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from forerun.doctor.command import survey_machine
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.graphs.steps import DecodeBatch
from forerun.executor.step.inputs import PrefillBatch, PrefillTokens
from forerun.platform import cpu_threads, thread_tuner
from forerun.platform.cpu_threads import SMALL_WEIGHTS, CpuThreads, intra_op_threads
from tests.golden_engine import CASES, golden_llm


def test_the_machine_has_cores() -> None:
    usable, physical = cpu_threads.logical_cores(), cpu_threads._physical_cores()
    assert 1 <= physical <= usable <= (os.cpu_count() or 1)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of four cores with two threads each; torch starts with four, and nothing is set."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(cpu_threads, "_physical_cores", lambda: 4)
    monkeypatch.setattr(cpu_threads, "logical_cores", lambda: 8)
    for name in cpu_threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_cores")
def test_small_models_are_timed_and_others_run_on_all_cores() -> None:
    for _ in range(2):
        small = CpuThreads.choose(SMALL_WEIGHTS - 1, fixed_order=True)
        assert (small.count, small.tuned) == (4, True)
        large = CpuThreads.choose(SMALL_WEIGHTS, fixed_order=True)
        assert (large.count, large.tuned) == (4, False)
        torch.set_num_threads(8)  # what torch starts with where it does not know of physical cores


@pytest.mark.usefixtures("four_cores")
def test_small_models_run_on_one_thread_where_it_would_change_texts_or_there_is_one_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = CpuThreads(1, "weights under 256 MiB")
    assert CpuThreads.choose(SMALL_WEIGHTS - 1, fixed_order=False) == one
    monkeypatch.setattr(cpu_threads, "_physical_cores", lambda: 1)
    torch.set_num_threads(1)
    assert CpuThreads.choose(SMALL_WEIGHTS - 1, fixed_order=True) == one


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("name", cpu_threads.VARIABLES)
@pytest.mark.parametrize("weight_bytes", [1, SMALL_WEIGHTS])
def test_the_environment_is_respected(
    name: str, weight_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "4")
    assert CpuThreads.choose(weight_bytes, True) == CpuThreads(4, f"{name} is set")


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("weight_bytes", [1, SMALL_WEIGHTS])
def test_set_num_threads_is_respected(weight_bytes: int) -> None:
    torch.set_num_threads(3)
    chosen = CpuThreads.choose(weight_bytes, True)
    assert chosen == CpuThreads(3, "torch.set_num_threads was called")


@pytest.mark.usefixtures("four_cores")
def test_threads_apply_inside_only() -> None:
    with pytest.raises(ValueError, match="stop"), intra_op_threads(2):
        assert torch.get_num_threads() == 2
        raise ValueError("stop")
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_cores")
def test_a_thread_that_begins_within_a_block_of_another() -> None:
    """It has the number of that block, which nobody asked for."""
    found = []

    def choose() -> None:
        found.append((torch.get_num_threads(), CpuThreads.choose(SMALL_WEIGHTS, True)))

    with intra_op_threads(3):
        thread = threading.Thread(target=choose)
        thread.start()
        thread.join()
    assert found == [(3, CpuThreads(4, "all physical cores"))]


@pytest.mark.usefixtures("four_cores")
def test_prompts_have_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with golden_llm(None) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        assert executor.tuner is not None
        executor.tuner.count = 1
        assert (executor.num_threads(), executor.num_threads(with_prompts=True)) == (1, 4)
        seen = set()
        prefill = executor.steps.prefill

        def spied(batch: PrefillBatch) -> PrefillTokens:
            seen.add(torch.get_num_threads())
            return prefill(batch)

        monkeypatch.setattr(executor.steps, "prefill", spied)
        llm.generate(input_ids=CASES[0]["prompt"], sampling_params={"max_new_tokens": 2})
        assert seen == {4}


def run(algorithm: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, set[int], Any]:
    """(outputs, threads of the steps, what `explain` says)."""
    seen: set[int] = set()
    with golden_llm(algorithm) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        decode = executor.steps.decode

        def spied(batch: DecodeBatch) -> Any:
            seen.add(torch.get_num_threads())
            return decode(batch)

        monkeypatch.setattr(executor.steps, "decode", spied)
        outs = llm.generate(
            input_ids=[case["prompt"] for case in CASES[:4]],
            sampling_params={"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True},
        )
        return [out.output_ids for out in outs], seen, llm.explain()["threads"]


@pytest.mark.covering(0)
@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("algorithm", [None, "DFLASH"])
def test_an_engine_runs_on_its_threads_with_the_same_text(
    algorithm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_tuner, "PROBE_INTERVAL", 2)  # steps run both ways
    monkeypatch.setattr(thread_tuner, "LAST_PROBE", 2)
    texts, seen, said = run(algorithm, monkeypatch)
    assert 1 in seen and len(seen) > 1 and max(seen) <= 4
    why = "weights under 256 MiB: one or several, whichever is faster"
    assert said == {"count": 4, "reason": why, "tuned": True}
    assert torch.get_num_threads() == 4  # of the caller
    monkeypatch.setattr(cpu_threads, "SMALL_WEIGHTS", 0)
    large = run(algorithm, monkeypatch)
    said = {"count": 4, "reason": "all physical cores", "tuned": False}
    assert large == (texts, {4}, said)


@pytest.mark.usefixtures("four_cores")
def test_doctor_says_both() -> None:
    cpu = survey_machine()["devices"][0]["threads"]
    assert (cpu["small"]["count"], cpu["large"]["count"]) == (4, 4)
    assert cpu["small"]["tuned"] and not cpu["large"]["tuned"]
