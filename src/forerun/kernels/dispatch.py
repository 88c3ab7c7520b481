"""Where Triton comes in: which tensors its kernels serve, and kernels that import it when launched.

A kernel file reads like any Triton code, with `tl` imported for type checkers only:

    if TYPE_CHECKING:
        import triton.language as tl

    @jit
    def _kernel(x, n, BLOCK: tl.constexpr): ...

    def f(x):                                # the public function
        if not use_triton(x):
            return f_torch(x)                # the twin, in plain PyTorch
        _kernel[grid](x, n, BLOCK=128)

Importing such a file costs nothing and works without Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor


def use_triton(tensor: Tensor) -> bool:
    """Whether kernels serve this tensor: on a GPU, or in Triton's interpreter (tests)."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


class Kernel:
    """A function in Triton's language, or a helper of one: given to `triton.jit` on first use.

    Then `tl` and the file's other kernels are put in place in its module, so that every further
    launch is Triton's own. TRITON_INTERPRET must not change once a kernel has run.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._jitted: Any = None

    def load(self) -> Any:
        """The function as Triton knows it."""
        if self._jitted is None:
            import triton
            import triton.language as tl

            self._jitted = triton.jit(self.fn)
            scope = self.fn.__globals__
            scope["tl"] = tl
            for name, value in list(scope.items()):
                if isinstance(value, Kernel):
                    scope[name] = value.load()
        return self._jitted

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.load()[grid]  # type: ignore[no-any-return]


def jit(fn: Callable[..., Any]) -> Kernel:
    return Kernel(fn)
