"""Device timestamps, written between the kernels of a step.

CUDA events cannot time parts of a captured graph; a kernel that stores the device clock can.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import time

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl


@jit
def _timestamp_kernel(out, index, AMD: tl.constexpr):
    now = tl.extra.hip.memrealtime() if AMD else tl.extra.cuda.globaltimer()
    tl.store(out + index, now)


def write_timestamp(out: Tensor, index: int) -> None:
    """out[index] = the time at which all earlier work on the stream has finished.

    Launched without PDL, so the kernel waits for its predecessor to finish.

    Args:
        out: int64, contiguous; in ticks of `tick_ns`.
    """
    if out.is_cuda:  # Triton's interpreter has no device clock
        _timestamp_kernel[(1,)](out, index, AMD=torch.version.hip is not None, num_warps=1)
    else:
        write_timestamp_ref(out, index)


def write_timestamp_ref(out: Tensor, index: int) -> None:
    """`write_timestamp` on a CPU, with the host's monotonic clock."""
    out[index] = time.monotonic_ns()


def tick_ns(device: torch.device) -> int:
    """Nanoseconds per tick: 10 on AMD (a constant 100 MHz clock), else 1."""
    return 10 if device.type == "cuda" and torch.version.hip is not None else 1
