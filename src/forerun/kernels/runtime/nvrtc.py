"""Kernels in CUDA C++, for what Triton cannot say: compiled when first launched, kept on disk.

NVRTC compiles them in some tenths of a second; it and `cuda.bindings` come with PyTorch's CUDA
builds. Compiling needs no GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor


class CudaError(RuntimeError):
    """A call of the driver or the compiler failed."""


@cache
def available() -> bool:
    """Whether NVRTC can be called from Python, and the driver, if there is one, runs its code."""
    try:
        compiler = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()[1]
    except (ImportError, RuntimeError, OSError):  # no such package, or it finds no library
        return False
    try:
        version = _call(_driver().cuDriverGetVersion)
    except (CudaError, RuntimeError):  # no driver: compiling is all that is asked for here
        return True
    return bool(version // 1000 >= compiler)


def _call(function: Any, *args: Any) -> Any:
    """The value it returns besides its status, if any.

    Raises:
        CudaError: the status is not success.
    """
    status, *values = function(*args)
    if status.value != 0:
        raise CudaError(f"{function.__name__}: {status.name}")
    return values[0] if values else None


def compile_source(source: str, architecture: str, log: bool = False) -> tuple[bytes, str]:
    """CUDA C++ -> (machine code, the compiler's log).

    Args:
        architecture: "sm_90a".
        log: ask the assembler for registers, stack and shared memory.

    Raises:
        CudaError: with the log, if it does not compile.
    """
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), b"kernel.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}", "-std=c++17"]
    options += ["--ptxas-options=-v"] if log else []
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    text = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
    _call(nvrtc.nvrtcGetProgramLog, program, text)
    said = text.decode().rstrip("\0")
    if status.value != 0:
        raise CudaError(f"{status.name}\n{said}")
    code = bytearray(_call(nvrtc.nvrtcGetCUBINSize, program))
    _call(nvrtc.nvrtcGetCUBIN, program, code)
    _call(nvrtc.nvrtcDestroyProgram, program)
    return bytes(code), said


def _compiled(source: str, architecture: str) -> bytes:
    """`compile_source`, kept beside Triton's kernels."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256(f"{source} {architecture} {version}".encode()).hexdigest()
    caches = importlib.import_module("triton.runtime.cache")
    manager = caches.get_cache_manager(key)
    found = manager.get_file("kernel.cubin")
    if found is not None:
        with open(found, "rb") as file:
            return file.read()
    code, _ = compile_source(source, architecture)
    manager.put(code, "kernel.cubin", binary=True)
    return code


@dataclass(frozen=True)
class Function:
    """A kernel on a device, with the shared memory it is launched with."""

    handle: Any
    shared: int


def load(source: str, name: str, architecture: str, shared: int, device: torch.device) -> Function:
    """The kernel `name` of a source, with so many bytes of dynamic shared memory."""
    driver = _driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context
        module = _call(driver.cuModuleLoadData, _compiled(source, architecture))
        handle = _call(driver.cuModuleGetFunction, module, name.encode())
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuFuncSetAttribute, handle, attribute, shared)
    return Function(handle, shared)


def tensor_map(matrix: Tensor, block: tuple[int, int]) -> Any:
    """For bulk copies of blocks [rows, columns] of a bfloat16 matrix, in the 128-byte swizzle.

    What lies past the matrix's end comes as zeros.
    """
    pitch = matrix.stride(0) * matrix.element_size()
    return _tensor_map(matrix.data_ptr(), tuple(matrix.shape), pitch, block)


@lru_cache(maxsize=1 << 14)  # weights stay where they are, and memory is used again
def _tensor_map(address: int, shape: tuple[int, int], pitch: int, block: tuple[int, int]) -> Any:
    driver = _driver()
    (rows, columns), one = shape, driver.cuuint32_t(1)
    return _call(
        driver.cuTensorMapEncodeTiled,
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],  # the innermost dimension first
        [driver.cuuint64_t(pitch)],
        [driver.cuuint32_t(block[1]), driver.cuuint32_t(block[0])],
        [one, one],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def launch(
    function: Function, grid: int, threads: int, args: Sequence[Any], device: torch.device
) -> None:
    """On the current stream; it may start before the kernel before it ends (pdl.py).

    Args:
        args: tensors or None (pointers), ints, floats, tensor maps.
    """
    config = _config(grid, threads, function.shared, torch.cuda.current_stream(device).cuda_stream)
    _kept, places = _arguments(args)
    _call(_driver().cuLaunchKernelEx, config, function.handle, places, 0)


@cache
def _config(grid: int, threads: int, shared: int, stream: int) -> Any:
    driver = _driver()
    overlap = driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = stream
    config.attrs, config.numAttrs = [overlap], 1
    return config


def _arguments(args: Sequence[Any]) -> tuple[Any, int]:
    """The arguments' values with a list of where each lies, and that list's address."""
    count = len(args)
    room = (ctypes.c_uint64 * (2 * count))()
    first = ctypes.addressof(room)
    for i, value in enumerate(args):
        room[count + i] = first + 8 * i
        if isinstance(value, Tensor):
            room[i] = value.data_ptr()
        elif isinstance(value, float):
            ctypes.c_float.from_buffer(room, 8 * i).value = value
        elif isinstance(value, int):
            ctypes.c_int.from_buffer(room, 8 * i).value = value
        elif value is not None:  # a tensor map
            room[count + i] = int(value.getPtr())
    return room, first + 8 * count


@cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")
