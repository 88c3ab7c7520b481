"""Functions of single values, log-sum-exp and the argmax of a sum, on a CPU.

PyTorch computes what does not fill a register by other code, with other bits, and how a tensor is
cut into registers depends on its size and the threads. Here a value's result depends on it alone,
and a row's on the row.
"""

from __future__ import annotations

from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu.library import call, serves
from forerun.kernels.cpu.step import run_with


class _Function(Enum):
    """The values are those of `Function` in elementwise.cpp."""

    SIGMOID = 0
    TANH = 1
    GELU_TANH = 2


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), of x's dtype; by PyTorch where our kernels do not serve."""
    return _apply(_Function.SIGMOID, x) if serve(x) else torch.sigmoid(x)


def tanh(x: Tensor) -> Tensor:
    """tanh(x), of x's dtype; by PyTorch where our kernels do not serve."""
    return _apply(_Function.TANH, x) if serve(x) else torch.tanh(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU(x) in its tanh form, of x's dtype; by PyTorch where our kernels do not serve."""
    return _apply(_Function.GELU_TANH, x) if serve(x) else F.gelu(x, approximate="tanh")


def log_sum_exp(x: Tensor) -> Tensor:
    """log Σ exp(x) over the last dimension, float32, where our kernels `serve`."""
    x = x.contiguous()
    out = torch.empty(x.shape[:-1], dtype=torch.float32)
    size, bfloat16 = x.shape[-1], x.dtype == torch.bfloat16
    call("forerun_log_sum_exp", x.data_ptr(), out.numel(), size, out.data_ptr(), bfloat16)
    return out


def add_argmax(x: Tensor, y: Tensor) -> Tensor:
    """The index of the largest x + y in each row, the lowest of equals, where our kernels `serve`.

    x, y [B, C] of one dtype; elements of a row are contiguous -> [B] int64; 0 for rows in which all
    are NaN or -inf.
    """
    rows, size = x.shape
    out = torch.empty(rows, dtype=torch.int64)
    call(
        "forerun_add_argmax", x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), rows, size,
        out.data_ptr(), x.dtype == torch.bfloat16,
    )  # fmt: skip
    return out


def confidences(hidden: Tensor, more: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """σ(w · [hidden ; more] + b) as in `kernels/drafting/confidence.py`, of tensors of one dtype
    that our kernels `serve`.
    """
    batch, depth, size = hidden.shape
    out = torch.empty(batch, depth, dtype=torch.float32)
    sizes = batch, depth, size, 0 if more is None else more.shape[2]
    strides = hidden.stride(0), hidden.stride(1), hidden.dtype == torch.bfloat16
    run_with("forerun_confidences", (hidden, more, weight, bias, out), *sizes, *strides)
    return out


def serve(x: Tensor) -> bool:
    """Whether our kernels do, for a tensor of this kind."""
    return serves(x.dtype, x.device)


def _apply(function: _Function, x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    bfloat16 = x.dtype == torch.bfloat16
    call("forerun_apply", function.value, x.data_ptr(), x.numel(), out.data_ptr(), bfloat16)
    return out
