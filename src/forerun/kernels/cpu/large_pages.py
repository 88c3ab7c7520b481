"""Memory for weights on a CPU in large pages.

Reading a weight then misses the TLB less often, and what hardware reads ahead does not end every 4
KiB. A large page has 2 MiB, more than most matrices of a small model, so they share blocks.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.cpu.library import call

BLOCK = 32 << 20  # bytes; what no weight has taken of it is not in memory
ALIGNMENT = 64


class _Blocks:
    """Hands out one block after the other; it is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: weakref.ref[np.ndarray] | None = None
        self._used = 0  # bytes

    def take(self, nbytes: int) -> Tensor:
        if nbytes > BLOCK:
            return torch.from_numpy(_new_block(nbytes))
        with self._lock:
            block = None if self._block is None else self._block()
            if block is None or self._used + nbytes > BLOCK:
                block, self._used = _new_block(BLOCK), 0
                self._block = weakref.ref(block)
            first = self._used
            self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
            return torch.from_numpy(block)[first : first + nbytes]


def _new_block(nbytes: int) -> np.ndarray:
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    call("forerun_advise_huge_pages", whole.ctypes.data, whole.nbytes)
    first = -whole.ctypes.data % ALIGNMENT
    return whole[first : first + nbytes]


_blocks = _Blocks()


def empty(nbytes: int) -> Tensor:
    """[nbytes] uint8, not initialised."""
    return _blocks.take(nbytes)
