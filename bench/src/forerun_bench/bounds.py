"""Lower bounds of a decode step: the bytes it must read, its GEMMs, and the time both take.

The floor is weight bytes (the LM head once for each time it is read; of a mixture of experts, the
expected number of touched ones) plus the batch's K/V bytes, over the measured read bandwidth. It
leaves out what is small: norms, biases, embedding rows, activations and all writes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from forerun.engine.engine import Engine
from forerun.executor.device_executor import device_step
from forerun.plan.work import Work, kv_bytes
from forerun_bench.ceilings import Ceilings, gemm_seconds
from forerun_bench.gemms import step_gemms


def step_work(engine: Engine, batch_size: int, context: int) -> Work:
    """Measured on an idle engine, with `context` tokens of K/V per request."""
    step = device_step(engine.executor)
    size = kv_bytes(step.attention.pools.layout, step.model.layer_masks, context)
    if step.draft_attention is not None:
        layout = step.draft_attention.pools.layout
        size += kv_bytes(layout, step.caps.draft_attention, context)
    return Work(step_gemms(engine, batch_size), batch_size * size)


@dataclass(frozen=True)
class Bounds:
    """The bounds that a measured step is compared with."""

    weight_bytes: int
    kv_bytes: int
    flops: int
    floor_seconds: float
    gemm_seconds: float  # the GEMMs alone, in the vendor's library
    host_gap: float | None = None  # fraction of the time that the GPU is idle between steps

    @classmethod
    def of(cls, work: Work, ceilings: Ceilings, device: torch.device) -> Bounds:
        size = work.weight_bytes + work.kv_bytes
        return cls(
            work.weight_bytes,
            work.kv_bytes,
            work.flops,
            floor_seconds=size / ceilings.read_bytes_per_second,
            gemm_seconds=gemm_seconds(work.gemms, device),
        )

    def as_dict(self, step_seconds: float | None) -> dict[str, Any]:
        return {**asdict(self), "ratio_to_floor": self.ratio(step_seconds)}

    def ratio(self, step_seconds: float | None) -> float | None:
        """A measured step over the floor."""
        return None if step_seconds is None else step_seconds / self.floor_seconds
