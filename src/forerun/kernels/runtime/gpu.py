"""What kernels choose their tiles by."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache

import torch

from forerun.kernels.runtime.jit import triton


@dataclass(frozen=True)
class GpuInfo:
    """Facts of a device."""

    num_sms: int  # streaming multiprocessors, compute units
    amd: bool
    wave: int = 32  # threads a warp; AMD's data centre chips have 64
    capability: int = 90  # CUDA's, of two digits; means nothing where `amd`
    shared: int = 227 << 10  # bytes of shared memory a program may have
    interpreted: bool = False


@cache
def gpu_of(device: torch.device) -> GpuInfo:
    """In Triton's interpreter: a small imaginary one."""
    if device.type != "cuda":
        return GpuInfo(num_sms=4, amd=False, interpreted=True)
    properties = torch.cuda.get_device_properties(device)
    amd = torch.version.hip is not None
    capability = 10 * properties.major + properties.minor
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return GpuInfo(properties.multi_processor_count, amd, properties.warp_size, capability, shared)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= n (n >= 1). Works without Triton."""
    return 1 << (n - 1).bit_length()


def have_triton(device: str) -> bool:
    """Whether kernels can run on this kind of device ("cuda", also ROCm's; "cpu": interpreted)."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
