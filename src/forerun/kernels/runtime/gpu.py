"""Device properties that tile sizes and GEMM dispatch depend on."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import triton


@dataclass(frozen=True)
class GpuInfo:
    """Properties of one device."""

    num_sms: int  # streaming multiprocessors (NVIDIA) or compute units (AMD)
    amd: bool
    warp_size: int = 32  # 64 on AMD's CDNA GPUs
    capability: int = 90  # CUDA compute capability, 10 * major + minor; undefined if `amd`
    smem_bytes: int = 227 << 10  # most shared memory (LDS) of one CTA
    interpreted: bool = False  # Triton's interpreter on a CPU


@cache
def gpu_of(device: torch.device) -> GpuInfo:
    """Properties of a CUDA or ROCm device; for a CPU, a small fictitious GPU (interpreter)."""
    if device.type != "cuda":
        return GpuInfo(num_sms=4, amd=False, interpreted=True)
    properties = torch.cuda.get_device_properties(device)
    amd = torch.version.hip is not None
    capability = 10 * properties.major + properties.minor
    index = torch.cuda.current_device() if device.index is None else device.index
    smem = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return GpuInfo(properties.multi_processor_count, amd, properties.warp_size, capability, smem)


def vector_warps(elements: int, tensor: Tensor) -> int:
    """Warps of a CTA for this many elements, 8 per thread: 16 bytes of bfloat16."""
    return min(16, max(1, elements // (8 * gpu_of(tensor.device).warp_size)))


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= n (n >= 1). Works without Triton."""
    return 1 << (n - 1).bit_length()


def have_triton(device: str) -> bool:
    """Whether Triton kernels can run on this device type.

    "cuda" (also ROCm): if Triton is installed. "cpu": if its interpreter is enabled as well.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    return device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
