"""Programmatic dependent launch: a kernel starts while the one before it on the stream runs out.

Such a kernel takes a constant PDL, and where it is set calls `tl.extra.cuda.gdc_wait()` in every
program before it touches anything another kernel writes or reads (weights never change, so they
may be fetched before), and `tl.extra.cuda.gdc_launch_dependents()` at its start, so that the kernel
after it may come. It is launched with `**pdl_options(tensor)`.

Two read results before they wait: rope (`qkv.py`: positions, rows), attention (`attention.py`:
starts, page tables, older K/V). That is right where a launch without programmatic dependence (any
kernel of PyTorch's, a copy) lies between the writer and them: it waits for the writer's end, and
nothing after it starts earlier. In a step these are `prepare` and then the embedding; between the
one-row passes of a chain draft `pool_rows` and the embedding; in a prompt the upload of its tiles.
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
