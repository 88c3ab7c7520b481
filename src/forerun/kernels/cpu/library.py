"""The compiled kernels for CPUs, called through ctypes.

`library()` is None where they cannot be used, and `why_missing()` says why. Then everything runs in
plain PyTorch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.kernels.cpu.build import CompileError, compile_library

log = logging.getLogger("forerun")

VARIABLE = "FORERUN_CPU_KERNELS"  # "0": plain PyTorch

# Name -> argument types. Pointers are addresses; the last argument is the number of threads. Those
# that a step calls come first, in the order of `Kernel` in run.cpp.
SIGNATURES: dict[str, tuple[type, ...]] = {
    "forerun_gemm": (c_void_p, c_void_p, c_int64, c_void_p, c_int32),
    "forerun_gemm_add_norm": (
        c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int32
    ),
    "forerun_gemm_silu_mul": (c_void_p, c_void_p, c_int64, c_void_p, c_int32),
    "forerun_gemm_argmax": (c_void_p, c_void_p, c_int64, c_void_p, c_int32),
    "forerun_rms_norm": (
        c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_void_p, c_int32,
        c_int32,
    ),
    "forerun_rope_write": (c_void_p, c_int32),
    "forerun_attention": (c_void_p, c_int32),
    "forerun_take_rows": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32),
    "forerun_decode_inputs": (c_void_p, c_int32),
    "forerun_verify_inputs": (c_void_p, c_int32),
    "forerun_accept_commit": (c_void_p, c_int32),
    "forerun_ring_write": (c_void_p, c_int32),
    "forerun_take_packed_rows": (c_void_p, c_void_p, c_int64, c_void_p, c_int32),
    "forerun_kv_slots": (c_void_p, c_int32),
    "forerun_copy_rows": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int32),
    "forerun_ring_read": (c_void_p, c_int32),
    "forerun_prompt_lookup": (c_void_p, c_int32),
    "forerun_suffix_append": (c_void_p, c_int32),
    "forerun_suffix_drafts": (c_void_p, c_int32),
    "forerun_experts": (c_void_p, c_int32),
    "forerun_causal_conv": (c_void_p, c_int32),
    "forerun_gated_delta": (c_void_p, c_int32),
    "forerun_gated_norm": (
        c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int32, c_int32
    ),
    "forerun_apply": (c_int32, c_void_p, c_int64, c_void_p, c_int32, c_int32),
    "forerun_log_sum_exp": (c_void_p, c_int64, c_int64, c_void_p, c_int32, c_int32),
    "forerun_head_gemm": (c_void_p, c_int32),
    "forerun_survival": (c_void_p, c_int32),
    "forerun_learn": (c_void_p, c_int32),
    "forerun_allocate": (c_void_p, c_int32),
    "forerun_pack_tokens": (c_void_p, c_int32),
    "forerun_add_argmax": (
        c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32, c_int32
    ),
    "forerun_count_reliability": (c_void_p, c_int32),
    "forerun_confidences": (c_void_p, c_int32),
    # Not of steps.
    "forerun_replay_delta": (c_void_p, c_void_p, c_void_p, c_void_p, c_int32),
    "forerun_pack": (
        c_void_p, c_int32, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_int32
    ),
    "forerun_advise_huge_pages": (c_void_p, c_int64, c_int32),
    "forerun_run": (c_void_p, c_int64, c_int32),
}  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """The library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str | None


def _load() -> Loaded:
    if os.environ.get(VARIABLE) == "0":
        return Loaded(None, f"{VARIABLE} is 0")
    return compiled()


@cache
def compiled(*target: str) -> Loaded:
    """Compiles the library, or reads it from the cache; `target`: as of `compile_library`."""
    try:
        loaded = ctypes.CDLL(str(compile_library(target=target or None)))
    except CompileError as error:
        return _missing(str(error))
    except OSError as error:  # of the cache, which XDG_CACHE_HOME places
        return _missing(f"{error}; set XDG_CACHE_HOME to a folder that can be written")
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.forerun_panel.restype = c_int64
    return Loaded(loaded, None)


def _missing(reason: str) -> Loaded:
    text = "The C++ kernels for CPUs are not used, and decoding is slower: %s. %s=0 hides this."
    log.warning(text, reason, VARIABLE)
    return Loaded(None, reason)


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


def serves_tables(tensor: Tensor) -> bool:
    """Whether the small kernels of a step run on tables like this one."""
    return tensor.device.type == "cpu" and library() is not None


class Recorder(Protocol):
    """What is told of every call of a kernel, and makes it."""

    def call(self, name: str, arguments: tuple[Any, ...], keep: object) -> None:
        """`arguments`: as the kernel gets them, without the number of threads.

        `keep`: what must live as long as the call may be made again.
        """


_recording = threading.local()  # recorder: Recorder of this thread, where one records


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Calls of this thread in the block go through `recorder`."""
    _recording.recorder = recorder
    try:
        yield
    finally:
        del _recording.recorder


def call(name: str, *arguments: Any, keep: object = None) -> None:
    """Runs a kernel on PyTorch's number of threads; where `serves` has said that there are some.

    Tensors are passed as addresses. `keep`: a structure among the arguments, by its address.
    """
    recorder = vars(_recording).get("recorder")
    if recorder is not None:
        recorder.call(name, arguments, keep)
    else:
        run(name, arguments)


def run(name: str, arguments: tuple[Any, ...]) -> None:
    """`call` without a recorder."""
    _functions(library())[name](*arguments, torch.get_num_threads())


def panel() -> int:
    """Rows of a weight that lie next to each other."""
    loaded = library()
    assert loaded is not None
    return int(loaded.forerun_panel())


@cache
def _functions(loaded: ctypes.CDLL | None) -> dict[str, Any]:
    assert loaded is not None
    return {name: getattr(loaded, name) for name in SIGNATURES}
