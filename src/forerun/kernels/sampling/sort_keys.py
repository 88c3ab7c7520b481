"""Integers that sort like a value and, where values are equal, like an id."""

from __future__ import annotations

import torch
from torch import Tensor

_ID_BITS = 32


def sort_keys(values: Tensor, ids: Tensor) -> Tensor:
    """values [..., n] float32 without NaN, ids [n] or [..., n] int64, >= 0 -> [..., n] int64."""
    bits = (values + 0.0).view(torch.int32)  # -0 equals 0
    return (_ordered(bits).long() << _ID_BITS) | ids


def from_sort_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The values [..., n] float32 and ids [..., n] int64 of keys [..., n]."""
    return _ordered((keys >> _ID_BITS).int()).view(torch.float32), keys & 0x7FFFFFFF


def _ordered(bits: Tensor) -> Tensor:
    """Returns integers in the order of float32's bits, and bits of such integers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
