"""Tensors on a GPU that end where mapped memory ends, so that a read beyond them is an error."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


class _Mapping:
    """GPU memory whose last byte is the last one mapped; never unmapped."""

    def __init__(self, size: int, device: int) -> None:
        driver = self._driver = importlib.import_module("cuda.bindings.driver")
        allocated = driver.CUmemAllocationProp()
        allocated.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        allocated.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        allocated.location.id = device
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call("cuMemGetAllocationGranularity", allocated, smallest)
        mapped = -(-size // granularity) * granularity
        # Twice as much is reserved; the second half is the guard.
        start = int(self._call("cuMemAddressReserve", 2 * mapped, 0, 0, 0))
        handle = self._call("cuMemCreate", mapped, allocated, 0)
        self._call("cuMemMap", start, mapped, 0, handle, 0)
        access = driver.CUmemAccessDesc()
        access.location = allocated.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", start, mapped, [access], 1)
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (start + mapped - size, False),
            "version": 3,
        }

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._driver, name)(*args)
        assert status.value == 0, f"{name}: {status}"
        return values[0] if values else None


def guarded(x: Tensor) -> Tensor:
    """Returns a contiguous copy of a CUDA tensor after whose last byte no memory is mapped.

    A kernel that reads beyond it ends in an illegal memory access, which the next synchronization
    reports. The memory is aligned as the size of the copy is.
    """
    mapping = _Mapping(x.numel() * x.element_size(), x.device.index or 0)
    memory = torch.as_tensor(mapping, device=x.device)
    return memory.view(x.dtype).view(x.shape).copy_(x)
