"""Programmatic dependent launch: a kernel starts while the one before it on the stream runs out.

Such a kernel takes a constant PDL, and where it is set calls `tl.extra.cuda.gdc_wait()` in every
program before it touches anything another kernel writes or reads (weights never change, so they
may be fetched before), and `tl.extra.cuda.gdc_launch_dependents()` at its start, so that the kernel
after it may come. It is launched with `**pdl_options(tensor)`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def pdl_options(tensor: Tensor) -> dict[str, Any]:
    """The constant PDL and, where it is set, the launch option: NVIDIA GPUs from sm_90 on."""
    index = tensor.device.index if tensor.is_cuda else None
    if index is not None and _capable(index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _capable(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)
