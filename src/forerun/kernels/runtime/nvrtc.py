"""CUDA C++ kernels, compiled by NVRTC on first launch and cached on disk.

For what Triton cannot express (multicast TMA on Hopper, an epilogue under full control). NVRTC and
`cuda.bindings` come with PyTorch's CUDA builds. A kernel compiles in 0.2 to 0.6 s; compiling does
not need a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from forerun.platform.progress import progress

SM90A = "sm_90a"  # Hopper, with wgmma
P = ParamSpec("P")


class CudaError(RuntimeError):
    """A CUDA driver or NVRTC call failed."""


@cache
def available() -> bool:
    """Whether NVRTC can be used, and the driver, if there is one, can run what it compiles."""
    try:
        compiler = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()[1]
    except (ImportError, RuntimeError, OSError):  # not installed, or its library is missing
        return False
    try:
        version = _check(_driver().cuDriverGetVersion)
    except (CudaError, RuntimeError):  # no driver: compiling alone works
        return True
    return bool(version // 1000 >= compiler)


def _check(function: Any, *args: Any) -> Any:
    """Calls a function of `cuda.bindings` and returns its value, if it has one.

    Raises:
        CudaError: the status is not success.
    """
    status, *values = function(*args)
    if status.value != 0:
        raise CudaError(f"{function.__name__} failed: {status.name}")
    return values[0] if values else None


def asm_operands(first: int, count: int) -> str:
    """The operands %first and on of inline PTX."""
    return ", ".join(f"%{i}" for i in range(first, first + count))


def asm_accumulators(name: str, count: int, constraint: str = "+f") -> str:
    """Operand constraints of inline PTX for all values of the array `name`."""
    return ", ".join(f'"{constraint}"({name}[{i}])' for i in range(count))


def with_macros(source: Path, macros: Mapping[str, int | str]) -> str:
    """The text of a `.cu` file with its configuration as macros in front, ready to compile."""
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    return f'{defines}#line 1 "{source.name}"\n{source.read_text(encoding="utf-8")}'


def compile_source(source: str, architecture: str, verbose: bool = False) -> tuple[bytes, str]:
    """CUDA C++ -> (cubin, compiler log). It may include the `.cuh` files.

    Args:
        architecture: such as `SM90A`.
        verbose: let ptxas log registers, stack and shared memory.

    Raises:
        CudaError: the source does not compile; the text holds the log.
    """
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    headers = _headers()
    contents, names = [t.encode() for t in headers.values()], [n.encode() for n in headers]
    program = _check(
        nvrtc.nvrtcCreateProgram, source.encode(), b"kernel.cu", len(headers), contents, names
    )
    options = _options(architecture) + (["--ptxas-options=-v"] if verbose else [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    buffer = bytearray(_check(nvrtc.nvrtcGetProgramLogSize, program))
    _check(nvrtc.nvrtcGetProgramLog, program, buffer)
    log = buffer.decode().rstrip("\0")
    if status.value != 0:
        raise CudaError(f"{status.name}\n{log}")
    cubin = bytearray(_check(nvrtc.nvrtcGetCUBINSize, program))
    _check(nvrtc.nvrtcGetCUBIN, program, cubin)
    _check(nvrtc.nvrtcDestroyProgram, program)
    return bytes(cubin), log


@cache
def _headers() -> dict[str, str]:
    """What a source may include, by name: the `.cuh` files of all kernels."""
    paths = sorted(Path(__file__).parent.parent.glob("*/*.cuh"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def _options(architecture: str) -> list[str]:
    return [f"--gpu-architecture={architecture}", "-std=c++17"]


def _compile_cached(source: str, architecture: str) -> bytes:
    """`compile_source` through Triton's cache directory."""
    cache_module = importlib.import_module("triton.runtime.cache")
    manager = cache_module.get_cache_manager(_cache_key(source, architecture))
    path = manager.get_file("kernel.cubin")
    if path is not None:
        with open(path, "rb") as file:
            return file.read()
    with progress("compiling CUDA C++ kernels"):
        cubin, _ = compile_source(source, architecture)
    manager.put(cubin, "kernel.cubin", binary=True)
    return cubin


def _cache_key(source: str, architecture: str) -> str:
    """A hash of everything the cubin depends on: source, headers, options, NVRTC's version."""
    version = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()[1:]
    return hashlib.sha256(
        f"{source} {_headers()} {_options(architecture)} {version}".encode()
    ).hexdigest()


@dataclass(frozen=True)
class CudaKernel:
    """A kernel that is loaded on a device, and its dynamic shared memory per CTA in bytes."""

    function: Any  # CUfunction
    smem_bytes: int


def load_kernel(
    source: str, name: str, architecture: str, smem_bytes: int, device: torch.device
) -> CudaKernel:
    """Compiles `source` (or reads its cubin from the cache) and loads its kernel `name`.

    Raises:
        CudaError: the source does not compile, or the driver refuses the cubin.
    """
    driver = _driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the device's context
        module = _check(driver.cuModuleLoadData, _compile_cached(source, architecture))
        function = _check(driver.cuModuleGetFunction, module, name.encode())
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute, function, attribute, smem_bytes)
    return CudaKernel(function, smem_bytes)


def loader(
    name: str, source: Callable[P, str], smem_bytes: Callable[P, int] | int = 0
) -> Callable[Concatenate[torch.device, P], CudaKernel]:
    """Returns a function of a device and of what `source` and `smem_bytes` take: the kernel `name`,
    compiled for Hopper and loaded once.
    """

    @cache
    def load(device: torch.device, *args: P.args, **kwargs: P.kwargs) -> CudaKernel:
        smem = smem_bytes if isinstance(smem_bytes, int) else smem_bytes(*args, **kwargs)
        return load_kernel(source(*args, **kwargs), name, SM90A, smem, device)

    return load  # type: ignore[return-value]  # as the cached function is typed


def tma_descriptor(tensor: Tensor, box: tuple[int, ...]) -> Any:
    """A TMA descriptor (CUtensorMap) for boxes of a tensor of any rank.

    bfloat16 or float16: the last dimension is contiguous; a box takes 64 elements of it, or fewer.
    128-byte swizzle. int64, for packed data: up to 256 elements of the last dimension, no swizzle;
    elements out of bounds are read as zeros. No L2 promotion: a row of a box has 128 bytes, and a
    promotion to 256 makes L2 fetch some of the next box as well, which costs up to 5 % of a step.
    """
    strides = tuple(stride * tensor.element_size() for stride in tensor.stride()[:-1])
    packed = tensor.dtype == torch.int64
    return _tma_descriptor(tensor.data_ptr(), tuple(tensor.shape), strides, box, packed)


def aligned_for_tma(x: Tensor) -> Tensor:
    """A 16-bit tensor [A, B, C], or a copy where TMA cannot read it: its rows need 16 bytes."""
    fits = x.stride(2) == 1 and x.stride(1) % 8 == 0 and x.stride(0) % 8 == 0
    return x if fits and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1 << 14)  # weights do not move, and the allocator reuses addresses
def _tma_descriptor(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    packed: bool,
) -> Any:
    """`strides`: in bytes, without the last, which is one element."""
    driver = _driver()
    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16  # two bytes
    swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_128B
    if packed:
        kind = kinds.CU_TENSOR_MAP_DATA_TYPE_INT64
        swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
    return _check(
        driver.cuTensorMapEncodeTiled,
        kind,
        len(shape),
        address,
        [driver.cuuint64_t(size) for size in reversed(shape)],  # the innermost dimension first
        [driver.cuuint64_t(stride) for stride in reversed(strides)],
        [driver.cuuint32_t(size) for size in reversed(box)],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def launch(
    kernel: CudaKernel, grid: int, block: int, args: Sequence[Any], device: torch.device
) -> None:
    """Launches `grid` CTAs of `block` threads on the current stream, with PDL (`pdl.py`).

    Args:
        args: the kernel's parameters in order: tensors or None (pointers), ints (int32), floats
            (float32), TMA descriptors.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    config = _launch_config(grid, block, kernel.smem_bytes, stream)
    _buffer, pointers = _pack_arguments(args)  # the buffer must live until the call returns
    _check(_driver().cuLaunchKernelEx, config, kernel.function, pointers, 0)


@cache
def _launch_config(grid: int, block: int, smem_bytes: int, stream: int) -> Any:
    driver = _driver()
    pdl = driver.CUlaunchAttribute()
    pdl.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    pdl.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = smem_bytes
    config.hStream = stream
    config.attrs, config.numAttrs = [pdl], 1
    return config


def _pack_arguments(args: Sequence[Any]) -> tuple[Any, int]:
    """(buffer, address of the array of pointers to the arguments), as cuLaunchKernel wants it.

    The buffer holds the values, then the pointers.
    """
    count = len(args)
    buffer = (ctypes.c_uint64 * (2 * count))()
    base = ctypes.addressof(buffer)
    for i, value in enumerate(args):
        buffer[count + i] = base + 8 * i
        if isinstance(value, Tensor):
            buffer[i] = value.data_ptr()
        elif isinstance(value, float):
            ctypes.c_float.from_buffer(buffer, 8 * i).value = value
        elif isinstance(value, int):
            ctypes.c_int.from_buffer(buffer, 8 * i).value = value
        elif value is not None:  # a TMA descriptor
            buffer[count + i] = int(value.getPtr())
    return buffer, base + 8 * count


@cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")
