"""Triton's interpreter, with less work around every operation and every call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest


class Grids:
    """In place of a kernel: its grids, of launches that do nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.seen.append(tuple(grid))
        return lambda *_args, **_kwargs: None

    def check(self, ctas: int) -> None:
        """One launch of so many CTAs, whose grid a GPU takes."""
        (grid,) = self.seen
        assert math.prod(grid) == ctas
        assert grid[0] < 1 << 31
        assert all(size < 1 << 16 for size in grid[1:])


def quicken(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute what they did, in less than half the time.

    `interpreter`: the module `triton.runtime.interpreter`.
    """
    builder = interpreter.interpreter_builder
    # Computed for every integer operation, and then asserted only if `debug` is set.
    if not builder.options.debug:
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    monkeypatch.setattr(interpreter, "_get_np_dtype", _numpy_dtype(interpreter))
    monkeypatch.setattr(interpreter, "_patch_lang", _patch_once(interpreter))
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", _patch_tensor(interpreter))


def multiply_row_by_row(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a product has the same bits whatever the other rows are, as on a GPU.

    With numpy's products that depends on the CPU.
    """

    def create_dot(a: Any, b: Any, d: Any, *_: Any) -> Any:
        x, y = (each.data.astype(d.data.dtype) for each in (a, b))
        product = np.add.reduce(x[..., None] * y[..., None, :, :], axis=-2)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", create_dot)


def _numpy_dtype(interpreter: Any) -> Any:
    """The interpreter makes a table of all dtypes for each one that it looks up."""
    find, pointer = interpreter._get_np_dtype, np.dtype(np.uint64)
    of_scalar = cache(find)

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return pointer if scalar.is_ptr() else of_scalar(scalar)

    return numpy_dtype


def _patch_once(interpreter: Any) -> Any:
    """Calls of functions in a kernel do not look for what the kernel's call has patched."""
    tl, patch = interpreter.tl, interpreter._patch_lang

    @cache
    def languages(fn: Any) -> list[Any]:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return [lang for lang in (tl, tl.core) if lang in modules]

    def patch_lang(fn: Any) -> Any:
        found = languages(fn)
        if found and not any(tl.core.is_builtin(lang.load) for lang in found):
            return interpreter._LangPatchScope()
        return patch(fn)

    return patch_lang


def _patch_tensor(interpreter: Any) -> Any:
    """Triton makes loop bounds with `int(array)`, which numpy 2.4 no longer takes."""
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patch_lang_tensor
