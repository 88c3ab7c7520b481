"""What scheduling makes of given step costs: figures that do not depend on the machine."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from forerun.config.engine_config import EngineConfig
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun_bench.simulated_load import (
    H200_8B,
    LOADS,
    PAGE,
    TOKEN,
    Clock,
    SimulatedExecutor,
    SimulatedLoad,
    StepCosts,
    simulate,
    table,
)

BURST, SIXTEEN, ALONE, POISSON = LOADS
OFF = {"max_mixed_step_ms": 0, "max_first_gap_ms": 0}  # decode in every step


def test_a_request_alone_takes_what_its_steps_do() -> None:
    report = simulate(ALONE)
    overhead = H200_8B.arrive + H200_8B.launch + H200_8B.answer
    assert report.ttft[50] == pytest.approx(0.0235 + overhead)
    assert (report.itl[50], report.longest_gap) == pytest.approx((0.0039, 0.0039))
    assert simulate(ALONE) == report


@pytest.mark.exhaustive
def test_a_burst_is_prefilled_before_it_decodes() -> None:
    now, mixed = simulate(BURST), simulate(BURST, **OFF)
    assert now.tokens_per_s > 0.99 * mixed.tokens_per_s
    assert now.ttft[50] < mixed.ttft[50] and now.ttft[99] < 0.98 * mixed.ttft[99]
    assert now.itl[99] < 0.02 < 0.19 < mixed.itl[99]
    assert now.longest_gap < 5.5  # max_first_gap_ms


@pytest.mark.exhaustive
def test_arrivals_wait_less_under_load() -> None:
    now, mixed = simulate(POISSON), simulate(POISSON, **OFF)
    assert now.ttft[50] < 0.85 * mixed.ttft[50] and now.ttft[99] < 0.8 * mixed.ttft[99]
    assert now.itl[99] < 0.1 and now.itl[50] <= mixed.itl[50] + 1e-4
    assert now.e2e < mixed.e2e


@pytest.mark.exhaustive
def test_waves_of_sixteen() -> None:
    now, mixed = simulate(SIXTEEN), simulate(SIXTEEN, **OFF)
    assert now.ttft[50] < 0.6 * mixed.ttft[50] and now.ttft[99] < 0.95 * mixed.ttft[99]
    assert now.tokens_per_s > 0.99 * mixed.tokens_per_s and now.itl[99] < mixed.itl[99] + 0.001


def test_a_slow_host_does_not_leave_the_device_idle() -> None:
    """Prompts' kernels are launched one by one, for about as long as they run: what is read late
    has ended long ago, and the step after it is half done."""
    fast, slow = (
        simulate(SimulatedLoad("prompts", 64, rate=30.0, output_len=2), _launching(seconds))
        for seconds in (0.0, 0.022)
    )
    assert slow.ttft[50] < fast.ttft[50] + 0.022 and slow.ttft[99] < 1.1 * fast.ttft[99] + 0.022


def _launching(prompts: float) -> StepCosts:
    return replace(H200_8B, launch_prompts=prompts)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "load", [SimulatedLoad("open", 200, rate=20.0), SimulatedLoad("more", 200, rate=40.0), BURST]
)
@pytest.mark.parametrize("limit", [100, 200])
def test_who_reads_gets_tokens_in_time(load: SimulatedLoad, limit: int) -> None:
    report = simulate(load, max_mixed_step_ms=limit, max_first_gap_ms=0)
    assert report.longest_gap < 1.1 * limit / 1000


def test_costs_and_table() -> None:
    costs = StepCosts(decode=((1, 0.01), (3, 0.03)), prefill=((1, 0.1), (101, 0.2)))
    load = SimulatedLoad("two", 2, concurrency=1, input_len=51, output_len=3)
    report = simulate(load, costs)
    assert report.ttft[50] == pytest.approx(0.15 + costs.arrive + costs.launch + costs.answer)
    assert report.longest_gap == pytest.approx(0.01)
    lines = table({"two": report}).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and lines[2].startswith("| two | ")


def test_the_next_step_is_planned_late() -> None:
    """What arrives during a step joins the next one, not the one after it."""
    clock = Clock()
    engine = Engine(EngineConfig(), SimulatedExecutor(H200_8B, 8192, 4, clock), clock)
    params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)

    def submit(token: int, size: int) -> Request:
        request = engine.make_request([token] * size, params)
        engine.submit(request)
        return request

    first = submit(2, 8000)
    assert engine.spare_seconds() == 0.0
    engine.step()
    assert engine.spare_seconds() == 0.0  # nothing is known yet
    while engine.has_work:
        engine.step()
    second = submit(3, 7000)
    engine.step()
    spare = engine.spare_seconds()
    assert 0.1 < spare < 0.152  # of about 152 ms
    clock.now += spare / 2
    assert engine.spare_seconds() == pytest.approx(spare / 2)
    clock.now += spare
    assert engine.spare_seconds() == 0.0
    while engine.has_work:
        engine.step()
    assert first.output == second.output == [TOKEN] * 3
    assert engine.spare_seconds() == 0.0
    engine.check()


def test_cached_prefixes_do_not_make_steps_long() -> None:
    """Prompts of a step are as many as the rest of those that wait says, not their prefixes."""
    clock = Clock()
    executor = SimulatedExecutor(H200_8B, 8192, 64, clock)
    engine, shared = Engine(EngineConfig(), executor, clock), [3] * 60 * PAGE
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)

    def serve(prompts: list[list[int]]) -> list[int]:
        before = len(executor.steps)
        for prompt in prompts:
            engine.submit(engine.make_request(prompt, params))
        while engine.has_work:
            engine.step()
        return [plan.num_prefill_tokens for plan, _ in executor.steps[before:]]

    for size in (300, 5000, 800, 4000):  # its times are learned
        serve([[4] * size])
    serve([[*shared, 5]])
    steps = serve([[*shared, 5 + i % 3, *[i // 3 % 4 + 4] * 100] for i in range(64)])
    assert sum(steps) > 4000 and max(steps) < 2000


def test_long_prompts_do_not_stall_who_reads() -> None:
    clock = Clock()
    executor = SimulatedExecutor(H200_8B, 8192, 16, clock)
    engine = Engine(EngineConfig(max_mixed_step_ms=200), executor, clock)

    def submit(token: int, size: int, new: int) -> Request:
        params = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
        request = engine.make_request([token] * size, params)
        engine.submit(request)
        return request

    for size in (500, 4000):  # so that the times of prompts are known
        submit(2, size, 2)
        while engine.has_work:
            engine.step()
    reader = submit(3, 100, 60)
    while len(reader.output) < 10:
        engine.step()
    long = [submit(4 + i, 8000, 2) for i in range(4)]
    times = []
    while not long[-1].output:
        before = len(reader.output)
        engine.step()
        times += [clock.now] * (len(reader.output) - before)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(gaps) >= 3 and max(gaps) < 0.22
