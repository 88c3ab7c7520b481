"""The compiled kernels for CPUs, called through ctypes.

`library()` is None where they cannot be used, and `why_missing()` says why. Then everything runs in
plain PyTorch.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from forerun.kernels.cpu.build import CompileError, compile_library

log = logging.getLogger("forerun")

VARIABLE = "FORERUN_CPU_KERNELS"  # "0": plain PyTorch

# Name -> argument types. Pointers are addresses; the last argument is the number of threads.
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "forerun_pack": (
        c_void_p, c_int32, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_int32
    ),
    "forerun_advise_huge_pages": (c_void_p, c_int64),
    "forerun_gemm": (c_void_p, c_void_p, c_int64, c_void_p, c_int32),
    "forerun_gemm_add_norm": (
        c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int32
    ),
    "forerun_gemm_silu_mul": (c_void_p, c_void_p, c_int64, c_void_p, c_int32),
    "forerun_gemm_argmax": (c_void_p, c_void_p, c_int64, c_void_p, c_int32),
    "forerun_rms_norm": (
        c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_void_p, c_int32, c_int32
    ),
    "forerun_rope_write": (c_void_p, c_int32),
    "forerun_attention": (c_void_p, c_int32),
}  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """The library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str | None


@cache
def _load() -> Loaded:
    if os.environ.get(VARIABLE) == "0":
        return Loaded(None, f"{VARIABLE} is 0")
    try:
        loaded = ctypes.CDLL(str(compile_library()))
    except (CompileError, OSError) as error:
        log.info("CPU kernels are not used: %s", error)
        return Loaded(None, str(error))
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.forerun_panel.restype = c_int64
    return Loaded(loaded, None)


def library() -> ctypes.CDLL | None:
    """The kernels; compiled or read from the cache by the first call."""
    return _load().library


def why_missing() -> str | None:
    """Why there are no kernels here and how to fix it, in one line; None: there are."""
    return _load().reason


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for tensors of this kind."""
    known = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    return known and library() is not None


def kernels() -> ctypes.CDLL:
    """`library()` where `serves` has said that there is one."""
    loaded = library()
    assert loaded is not None
    return loaded
