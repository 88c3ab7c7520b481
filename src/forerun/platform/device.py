"""Device, dtypes and memory of this machine.

AMD GPUs are "cuda" devices as well (PyTorch's ROCm build); `is_rocm` tells them apart.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path

import torch

from forerun.core.errors import ConfigError
from forerun.platform.cpu_threads import intra_op_threads

KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def resolve_device(name: str) -> torch.device:
    """The device for a setting "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: unknown device, or not available on this machine.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if gpus else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigError(f"Unknown device {name!r}. Known: auto, cpu, cuda, cuda:N.")
    if not gpus:
        raise ConfigError(f"device {name!r} was asked for, but {why_no_gpu()} Or use --device cpu.")
    index = int(match[1] or 0)
    if index >= gpus:
        raise ConfigError(
            f"device {name!r} does not exist: this machine shows {gpus} GPU{'s' * (gpus > 1)},"
            f" cuda:0{f' to cuda:{gpus - 1}' if gpus > 1 else ''}."
        )
    return torch.device("cuda", index)


def is_rocm() -> bool:
    """Whether this is PyTorch's ROCm build, so that "cuda" means AMD."""
    return torch.version.hip is not None


def gpu_arch(device: torch.device) -> str | None:
    """The architecture that kernels are built for, "sm_90" or "gfx942"; None: a CPU."""
    if device.type != "cuda":
        return None
    if is_rocm():
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def why_no_gpu() -> str | None:
    """Why no GPU can be used and how to fix it; None if one can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and not is_rocm():
        return "this torch is a CPU build; install the one for your GPU (pytorch.org)."
    return "torch sees no GPU; check the driver and CUDA_VISIBLE_DEVICES."


def fast_bf16(device: torch.device) -> bool:
    """Whether the device has bfloat16 GEMM instructions; otherwise float32 is faster.

    CPU: AVX512-BF16, AMX, or Arm's bf16. GPU: NVIDIA from sm_80 on, and AMD under ROCm.
    """
    if device.type == "cuda":
        return is_rocm() or torch.cuda.get_device_capability(device) >= (8, 0)
    return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations for a `dtype` setting.

    "auto" is the checkpoint's dtype, where float16 and bfloat16 become bfloat16 if the device is
    fast at it and float32 otherwise.

    Raises:
        ConfigError: the dtype is not supported.
    """
    if name == "auto":
        if checkpoint_dtype not in DTYPES:
            raise ConfigError(
                f"The checkpoint's dtype {checkpoint_dtype!r} is not supported."
                f" Known: {', '.join(DTYPES)}. Choose one to convert to with --dtype."
            )
        if checkpoint_dtype == "float32" or not fast_bf16(device):
            return torch.float32
        return torch.bfloat16
    if name not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype must be one of auto, bfloat16, float32, got {name!r}.")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """`"bfloat16"` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the K/V cache for a `kv_cache_dtype` setting; "auto" is the model's `dtype`.

    Raises:
        ConfigError: the dtype is not supported.
    """
    if name == "auto":
        return dtype
    if name not in KV_DTYPES:
        known = ", ".join(("auto", *KV_DTYPES))
        raise ConfigError(f"kv_cache_dtype must be one of {known}, got {name!r}.")
    return KV_DTYPES[name]


def memory(device: torch.device) -> tuple[int, int]:
    """(free, total) memory in bytes; on a CPU within the limits of the process's cgroup."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    free, total = _host_memory()
    limit, used = _cgroup_memory()
    if limit is not None and limit < total:
        return max(0, min(free, limit - used)), limit
    return free, total


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch, its libraries, Triton and the host allocator report it in different ways."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = str(error).lower()
    return any(sign in words for sign in ("out of memory", "alloc_failed", "can't allocate memory"))


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to `device`; to a GPU from pinned memory, asynchronously."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def running_on(device: torch.device, num_threads: int | None) -> AbstractContextManager[None]:
    """Makes `device` current for the calling thread, or sets its number of intra-op threads.

    Triton launches, events and captures use the current device of the calling thread. On a CPU,
    operations use `num_threads` if given.
    """
    if device.type == "cuda":
        return _current(device)
    return nullcontext() if num_threads is None else intra_op_threads(num_threads)


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):
        yield


def device_name(device: torch.device) -> str:
    """The vendor's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in _read(_CPUINFO).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """CPU features by their Linux names; empty on other systems."""
    for line in _read(_CPUINFO).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def versions() -> dict[str, str | None]:
    """Versions of Python and of relevant packages (None: not installed), without importing them.

    torch's names its build (+cpu, +cu130), which the metadata of the public index's wheel does not.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found | {"torch": str(torch.__version__)}


def _host_memory() -> tuple[int, int]:
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(_MEMINFO), flags=re.MULTILINE))
    if "MemTotal" in sizes:
        total = int(sizes["MemTotal"])
        return int(sizes.get("MemAvailable", total)) * 1024, total * 1024
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total  # macOS reports no free memory


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, used) bytes of the cgroup, v2 or v1; (None, 0) without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        text = _read(_CGROUP / limit).strip()
        if text.isdigit():
            return int(text), int(_read(_CGROUP / used).strip() or 0)
    return None, 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
