"""The device's clock, read between the kernels of a step: a graph can be timed in no other way."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import time

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl


@jit
def _stamp(out, at, AMD: tl.constexpr):
    now = tl.extra.hip.memrealtime() if AMD else tl.extra.cuda.globaltimer()
    tl.store(out + at, now)


def write_timestamp(out: Tensor, at: int) -> None:
    """out[at] = the time when all that was queued before is done, in ticks of `tick_ns`.

    out: int64, contiguous. No PDL: the kernel waits for the one before it to end.
    """
    if out.is_cuda:  # not in the interpreter, which has no clock
        _stamp[(1,)](out, at, AMD=torch.version.hip is not None, num_warps=1)
    else:
        write_timestamp_ref(out, at)


def write_timestamp_ref(out: Tensor, at: int) -> None:
    """The twin, for a CPU."""
    out[at] = time.monotonic_ns()


def tick_ns(device: torch.device) -> int:
    """Nanoseconds a tick: AMD's constant clock has 100 MHz."""
    return 10 if device.type == "cuda" and torch.version.hip is not None else 1
