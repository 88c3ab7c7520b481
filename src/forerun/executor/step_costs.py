"""Seconds of a decode step by batch size and width, measured at start on the padding slot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun.attention.base import HostBatch
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.steps import DecodeBatch
from forerun.sampling.sampler import SamplingFlags


@dataclass(frozen=True)
class Effort:
    """How much time measuring may take."""

    seconds: float  # in all; larger batches are extrapolated
    consecutive: int  # steps in a row, as they follow each other when the host runs ahead
    repetitions: int


CAPTURED, EAGER = Effort(5.0, 2, 3), Effort(2.0, 1, 2)


@torch.inference_mode()
def measure_step_costs(
    executor: DeviceExecutor, widths: Sequence[int], largest: int
) -> dict[int, list[float]]:
    """Seconds of a decode step of every width, by batch size up to `largest`.

    Stops at the batch size where time runs out: costs are taken to be in proportion beyond it.
    """
    effort = CAPTURED if executor.steps.captured else EAGER
    costs, end = {}, time.monotonic() + effort.seconds
    executor.step.dummy = True
    for batch in executor.steps.measured_batches(largest):
        costs[batch] = [_cost(executor, batch, width, effort) for width in widths]
        if time.monotonic() > end:
            break
    executor.step.dummy = False
    return costs


def _cost(executor: DeviceExecutor, batch: int, width: int, effort: Effort) -> float:
    caps = executor.step.caps
    slots = [executor.tables.padding_slot] * batch
    lengths = HostBatch.padding(batch)
    step = DecodeBatch(slots, width, 1 + caps.kv_reserve, SamplingFlags(), lengths)

    def seconds() -> float:
        _wait(executor)
        begin = time.monotonic()
        for _ in range(effort.consecutive):
            executor.steps.decode(step)
        _wait(executor)
        return (time.monotonic() - begin) / effort.consecutive

    executor.steps.decode(step)  # warm-up
    return min(seconds() for _ in range(effort.repetitions))


def _wait(executor: DeviceExecutor) -> None:
    if executor.tables.device.type == "cuda":
        torch.cuda.synchronize(executor.tables.device)
