"""CUDA graphs on a CPU: what PyTorch ran is recorded, and run again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def memory_of(x: Tensor) -> int:
    """An opaque tensor (oneDNN's weights) has none."""
    return 0 if x.is_mkldnn else x.untyped_storage().data_ptr()


class StandInRecorder(TorchDispatchMode):
    """A `GraphRecorder`. As in a memory pool, what was borrowed is lost when a piece begins after
    its end: a later layer's, or the next replay's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replayed = 0  # pieces
        self._recording = False
        self._calls: list[Callable[[], None]] = []
        self._borrowed: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # Views and in-place operations leave their output in memory that is there already.
        there = {memory_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        kept = [x for x in tree_leaves(out) if memory_of(x) not in there]

        def again() -> None:
            new = [x for x in tree_leaves(func(*args, **kwargs)) if memory_of(x) not in there]
            for old, value in zip(kept, new, strict=True):
                old.copy_(value)

        self._calls.append(again)
        return out

    def begin(self) -> None:
        self._calls = []
        self._lost = list(self._borrowed)
        self._recording = True
        self.__enter__()

    def abort(self) -> None:
        if self._recording:
            self._recording = False
            self.__exit__(None, None, None)

    def end(self) -> Callable[[], None]:
        self.abort()
        calls, lost = self._calls, self._lost

        def replay() -> None:
            self.replayed += 1
            for memory in lost:
                memory.fill_(torch.nan if memory.is_floating_point() else 1 << 30)
            for call in calls:
                call()

        return replay

    def borrow(self, x: Tensor) -> Tensor:
        self._borrowed.append(x)
        return x
