"""Triton kernels that import Triton only when they are launched.

A kernel file reads like any Triton code:

    # mypy: allow-untyped-defs, allow-incomplete-defs
    from forerun.kernels.runtime.jit import jit, tl, triton, use_triton

    @jit
    def _kernel(x, n, BLOCK: tl.constexpr): ...

    def f(x):                                # the public function
        if not use_triton(x):
            return f_ref(x)                  # the reference implementation, in plain PyTorch
        _kernel[grid](x, n, BLOCK=128)

Importing such a file is cheap and works without Triton.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

__all__ = ["LazyKernel", "LazyModule", "jit", "jit_no_specialize", "tl", "triton", "use_triton"]


class LazyModule:
    """A module that is imported on first attribute access, or when a kernel is first loaded."""

    def __init__(self, name: str) -> None:
        self.module = name

    def __getattr__(self, attribute: str) -> Any:
        return vars(importlib.import_module(self.module))[attribute]


if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    triton, tl = LazyModule("triton"), LazyModule("triton.language")


def use_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels run on this tensor: on a GPU, or in Triton's interpreter (tests)."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


_LOADING = threading.RLock()  # a kernel loads those that its module names


class LazyKernel:
    """A Triton kernel or device function that is passed to `triton.jit` on first use.

    Loading one kernel also replaces the lazy modules and kernels in its module's globals by the
    real ones, so that later launches go through Triton alone. TRITON_INTERPRET must not change
    once a kernel has run.
    """

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self.fn, self.options = fn, options
        self._jitted: Any = None
        self._loaded = False

    def load(self) -> Any:
        """The `triton.JITFunction` (or its interpreted counterpart). From any thread."""
        if not self._loaded:
            with _LOADING:
                self._load()
        return self._jitted

    def _load(self) -> None:
        if self._jitted is not None:
            return  # by another thread, or this one has come back to where it began
        self._jitted = triton.jit(self.fn, **self.options)
        scope, found = self.fn.__globals__, {}
        for name, value in list(scope.items()):
            if isinstance(value, LazyKernel):
                found[name] = value.load()
            elif isinstance(value, LazyModule):
                found[name] = importlib.import_module(value.module)
        scope.update(found)  # at once: other threads launch what they find there
        self._loaded = True

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.load()[grid]  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self.fn.__name__} is a Triton kernel: launch it as {self.fn.__name__}[grid](...), "
            "or call it inside another kernel."
        )


def jit(fn: Callable[..., Any]) -> LazyKernel:
    """`triton.jit`, deferred to the first launch."""
    return LazyKernel(fn)


def jit_no_specialize(*arguments: str) -> Callable[[Callable[..., Any]], LazyKernel]:
    """`jit` with Triton's `do_not_specialize` for the named integer arguments.

    Triton otherwise compiles variants for integers equal to 1 and for multiples of 16. Sizes that
    change from step to step must not trigger a compilation.
    """
    return lambda fn: LazyKernel(fn, do_not_specialize=arguments)
