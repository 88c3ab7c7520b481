"""Measures the time of decode steps by batch size and width, at start, on the padding slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.attention.base import HostBatch
from forerun.core.widths import verify_widths
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.graphs.steps import DecodeBatch
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.inputs import StepShape
from forerun.platform.cpu_threads import intra_op_threads
from forerun.sampling.sampler import SamplingFlags
from forerun.speculative.base import Draft


@dataclass(frozen=True)
class MeasurementBudget:
    """Limits of the measurement."""

    seconds: float  # in total; larger batch sizes are extrapolated
    consecutive: int  # steps launched back to back, as with overlap scheduling
    repetitions: int
    more: int = 0  # repetitions, while all together take less than `SHORT`


SHORT = 0.05  # seconds
# Other processes can hold up each of two short steps on a CPU.
CAPTURED, EAGER = MeasurementBudget(5.0, 2, 3), MeasurementBudget(2.0, 1, 2, more=6)


@torch.inference_mode()
def measure_threads(executor: DeviceExecutor) -> None:
    """Tells the executor's tuner, if it has one, what a plain step takes with 1, 2, ... threads."""
    shape = executor.tables.limits.verify_shape(1, 1)

    def seconds(count: int) -> float:
        with intra_op_threads(count):
            return _cost(executor, 1, shape, EAGER, float)

    if executor.tuner is not None and executor.step.model.has_lm_head:
        with executor.step.dummy_steps():
            executor.tuner.measure(seconds)


@torch.inference_mode()
def measure_step_costs(
    executor: DeviceExecutor,
    widths: Sequence[float],
    largest: int,
    slowest: Callable[[float], float] = float,
) -> dict[int, list[float]]:
    """Seconds of a decode step of every width, by batch size up to `largest`.

    Stops at the batch size where time runs out; costs are extrapolated in proportion beyond it.
    `slowest`: of a time, the largest of all ranks', which decides how many steps are run.
    """
    budget = CAPTURED if executor.steps.captured else EAGER
    costs, begin = {}, time.monotonic()
    limits = executor.tables.limits
    with executor.step.dummy_steps():
        for batch in executor.steps.measured_batches(largest):
            shapes = [limits.verify_shape(batch, width) for width in widths]
            of_shape = {
                shape: _cost(executor, batch, shape, budget, slowest)
                for shape in dict.fromkeys(shapes)
            }
            costs[batch] = [of_shape[shape] for shape in shapes]
            if slowest(time.monotonic() - begin) > budget.seconds:
                break
    return costs


def _cost(
    executor: DeviceExecutor,
    batch: int,
    shape: tuple[int, int],
    budget: MeasurementBudget,
    slowest: Callable[[float], float],
) -> float:
    caps = executor.step.caps
    slots = [executor.tables.padding_slot] * batch
    lengths, bound = HostBatch.padding(batch), 1 + caps.kv_reserve
    step = DecodeBatch(slots, shape[0], bound, SamplingFlags(), lengths, num_rows=shape[1])

    def seconds() -> float:
        _wait(executor)
        begin = time.monotonic()
        for _ in range(budget.consecutive):
            executor.steps.decode(step)
        _wait(executor)
        return slowest((time.monotonic() - begin) / budget.consecutive)

    executor.steps.decode(step)  # warm-up
    return shortest(seconds, budget)


@torch.inference_mode()
def measure_draft_costs(
    executor: DeviceExecutor, largest: int, slowest: Callable[[float], float] = float
) -> dict[int, dict[int, float]] | None:
    """Seconds of drafts by W and number of requests; None: a step drafts for all of them or none.

    Of the full W only, if steps cannot draft for less. Stops where time runs out, but not before
    that of one request is known. `slowest`: as in `measure_step_costs`.
    """
    step, steps, begin = executor.step, executor.steps, time.monotonic()
    if not steps.drafts_for_some:
        return None
    widths = verify_widths(step.caps.num_verify_tokens, steps.cuts_drafts)[1:]
    costs: dict[int, dict[int, float]] = {width: {} for width in widths}
    with step.dummy_steps():
        for count in steps.measured_batches(largest):
            for width in widths:
                costs[width][count] = _draft_cost(executor, count, width, slowest)
            if steps.cuts_drafts and slowest(time.monotonic() - begin) > EAGER.seconds:
                break
    return costs


def _draft_cost(
    executor: DeviceExecutor, count: int, width: int, slowest: Callable[[float], float]
) -> float:
    step, tables = executor.step, executor.tables
    shape = StepShape(width, 1 + step.caps.kv_reserve, SamplingFlags())
    slots = tables.upload([tables.padding_slot] * count, torch.int64)
    drafts = executor.steps.repeatable(partial(_propose, step, slots, shape))

    def seconds() -> float:
        _wait(executor)
        begin = time.monotonic()
        drafts()
        _wait(executor)
        return slowest(time.monotonic() - begin)

    seconds()  # warm-up
    return shortest(seconds, EAGER)


def _propose(step: DeviceStep, slots: Tensor, shape: StepShape) -> Draft:
    return step.propose(step.begin(slots, shape, proposed=True))


def shortest(seconds: Callable[[], float], budget: MeasurementBudget) -> float:
    """The shortest of repeated measurements: of steps that nothing held up."""
    taken = [seconds() for _ in range(budget.repetitions)]
    for _ in range(budget.more):
        if sum(taken) > SHORT:
            break
        taken.append(seconds())
    return min(taken)


def _wait(executor: DeviceExecutor) -> None:
    if executor.tables.device.type == "cuda":
        torch.cuda.synchronize(executor.tables.device)
