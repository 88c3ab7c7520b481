"""Where Triton comes in: which tensors its kernels serve, and kernels that import it when launched.

A kernel file reads like any Triton code:

    # mypy: allow-untyped-defs, allow-incomplete-defs
    from forerun.kernels.runtime.jit import jit, tl, triton, use_triton

    @jit
    def _kernel(x, n, BLOCK: tl.constexpr): ...

    def f(x):                                # the public function
        if not use_triton(x):
            return f_torch(x)                # the twin, in plain PyTorch
        _kernel[grid](x, n, BLOCK=128)

Importing such a file costs nothing and works without Triton.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

__all__ = ["LazyKernel", "LazyModule", "jit", "jit_for_any", "tl", "triton", "use_triton"]


class LazyModule:
    """A module that is imported when first asked for a name, or by a kernel beside it."""

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
    """Whether kernels serve this tensor: on a GPU, or in Triton's interpreter (tests)."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


class LazyKernel:
    """A function in Triton's language, or a helper of one: given to `triton.jit` on first use.

    Then `tl` and the file's other kernels are put in place in its module, so that every further
    launch is Triton's own. TRITON_INTERPRET must not change once a kernel has run.
    """

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self.fn, self.options = fn, options
        self._jitted: Any = None

    def load(self) -> Any:
        """The function as Triton knows it."""
        if self._jitted is None:
            self._jitted = triton.jit(self.fn, **self.options)
            scope = self.fn.__globals__
            for name, value in list(scope.items()):
                if isinstance(value, LazyKernel):
                    scope[name] = value.load()
                elif isinstance(value, LazyModule):
                    scope[name] = importlib.import_module(value.module)
        return self._jitted

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.load()[grid]  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.fn.__name__} runs inside kernels only")


def jit(fn: Callable[..., Any]) -> LazyKernel:
    return LazyKernel(fn)


def jit_for_any(*arguments: str) -> Callable[[Callable[..., Any]], LazyKernel]:
    """`jit`, and the named integers (row counts) are not compiled in: 1 and 16 are not special."""
    return lambda fn: LazyKernel(fn, do_not_specialize=arguments)
