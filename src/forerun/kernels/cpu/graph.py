"""A step on a CPU recorded once and run again, like a CUDA graph: the host work of a step is gone.

Calls of our kernels are recorded with their addresses; those in a row become one call into the
library. Operations of PyTorch between them are run again on the tensors that they had, and their
results are copied to where they were. So shapes and addresses must not change, and nothing in the
step may read a tensor's values on the host. That is what a step promises anyway.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import c_int64
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forerun.kernels.cpu.library import SIGNATURES, recorded_by, run
from forerun.kernels.cpu.step import copy_rows

T = TypeVar("T")

_KERNELS = {name: index for index, name in enumerate(SIGNATURES)}
_aten = torch.ops.aten
# Their results depend on values, or are read on the host.
_UNRECORDABLE = (
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
)
_READS = (
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__int__,
    Tensor.item,
    Tensor.numpy,
    Tensor.tolist,
)
_ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


class NotRecordable(BaseException):
    """The step reads a tensor's values on the host."""


class _Call(ctypes.Structure):
    """`Call` in run.cpp."""

    _fields_ = (("kernel", c_int64), ("words", c_int64 * 9))


class CpuGraph:
    """A recorded step."""

    def __init__(
        self, steps: list[Callable[[], object]], kept: list[Any], made: list[Tensor]
    ) -> None:
        self._steps = steps
        self._kept = kept  # tensors and structures whose addresses are recorded
        self._made = made  # of these, the tensors that are not views of others

    @classmethod
    def record(cls, body: Callable[[], T]) -> tuple[CpuGraph, T]:
        """Runs `body`; returns the graph, and the result, whose tensors every replay overwrites.

        Raises:
            NotRecordable: `body` reads values on the host.
        """
        recorder = _StepRecorder()
        with recorded_by(recorder), recorder, _RefuseReads():
            result = body()
        return cls(recorder.finish(), recorder.kept, recorder.made), result

    @property
    def num_parts(self) -> int:
        """Calls into the library and operations of PyTorch; 1: our kernels alone."""
        return len(self._steps)

    @property
    def nbytes(self) -> int:
        """Memory of the tensors that were made while it was recorded; not that of K/V pools."""
        return sum(x.untyped_storage().nbytes() for x in self._made)

    def replay(self) -> None:
        for step in self._steps:
            step()


class _RefuseReads(TorchFunctionMode):
    """Sees what PyTorch reads without an operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            raise NotRecordable(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _StepRecorder(TorchDispatchMode):
    """Sees every operation of PyTorch (as a dispatch mode) and every kernel (as a `Recorder`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Any] = []
        self.made: list[Tensor] = []
        self._steps: list[Callable[[], object]] = []
        self._calls: list[_Call] = []

    def call(self, name: str, arguments: tuple[Any, ...], keep: object) -> None:
        words = (c_int64 * 9)(*map(_word, arguments))
        self._calls.append(_Call(_KERNELS[name], words))
        self.kept.append(keep)
        run(name, arguments)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _UNRECORDABLE or (func is _aten.index.Tensor and _has_mask(args[1])):
            raise NotRecordable(str(func))
        kwargs = kwargs or {}
        if func is _aten.cat.default and _joins_rows(*args, **kwargs):
            return self._cat(*args)
        if func is _aten.stack.default and _stacks_columns(*args, **kwargs):
            return self._stack(*args)
        out = func(*args, **kwargs)
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.kept += results
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func in _ALLOCATIONS:
            self.made.append(out)
            return out
        there = {x.untyped_storage().data_ptr() for x in inputs}
        fresh = [x for x in results if x.untyped_storage().data_ptr() not in there]
        self.made += fresh
        if fresh and not any(x.numel() for x in results):
            return out  # nothing is in them
        if fresh:
            self._flush()
            self._steps.append(_again(func, args, kwargs, out))
        elif func._schema.is_mutable:
            self._flush()
            self._steps.append(lambda: func(*args, **kwargs))
        # Else a view: what is in its memory is written again by others.
        return out

    def _cat(self, tensors: list[Tensor], dim: int = 0) -> Tensor:
        """Concatenation of matrices by our kernel: PyTorch's takes as long as a small GEMM."""
        out: Tensor = _aten.cat.default(tensors, dim)
        return self._joined(out, tensors, out.split([x.shape[dim] for x in tensors], dim))

    def _stack(self, tensors: list[Tensor], dim: int = 0) -> Tensor:
        """[B, ...] each -> [B, N, ...], the same way."""
        out: Tensor = _aten.stack.default(tensors, dim)
        batch = out.shape[0]
        matrices = [x.view(batch, -1) for x in tensors]
        return self._joined(out, matrices, out.view(batch, len(tensors), -1).unbind(1))

    def _joined(self, out: Tensor, sources: list[Tensor], parts: Sequence[Tensor]) -> Tensor:
        self.kept += [*sources, out]
        self.made.append(out)
        for source, part in zip(sources, parts, strict=True):
            copy_rows(source, part)
        return out

    def finish(self) -> list[Callable[[], object]]:
        self._flush()
        return self._steps

    def _flush(self) -> None:
        """The calls since the last operation of PyTorch become one."""
        if not self._calls:
            return
        calls = (_Call * len(self._calls))(*self._calls)
        self.kept.append(calls)
        arguments = ctypes.addressof(calls), len(calls)
        self._steps.append(lambda: run("forerun_run", arguments))
        self._calls = []


def _joins_rows(tensors: list[Tensor], dim: int = 0) -> bool:
    """Whether they are matrices of one dtype with contiguous rows."""
    first = tensors[0]
    return all(x.ndim == 2 and x.dtype == first.dtype and x.stride(1) == 1 for x in tensors)


def _stacks_columns(tensors: list[Tensor], dim: int = 0) -> bool:
    """Whether contiguous tensors [B, ...] of one dtype become [B, N, ...]."""
    dtype = tensors[0].dtype
    return dim == 1 and all(x.numel() and x.is_contiguous() and x.dtype == dtype for x in tensors)


def _has_mask(indices: Any) -> bool:
    return any(x is not None and x.dtype == torch.bool for x in indices)


def _word(value: Any) -> int:
    """An argument as 8 bytes."""
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<fi", value, 0))[0])
    return 0 if value is None else int(value)


def _again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Callable[[], object]:
    """Runs an operation again and copies its results to where they were."""
    if isinstance(out, Tensor):
        return lambda: out.copy_(func(*args, **kwargs))
    kept = [x for x in tree_leaves(out) if isinstance(x, Tensor)]

    def several() -> None:
        for old, new in zip(kept, tree_leaves(func(*args, **kwargs)), strict=True):
            old.copy_(new)

    return several
