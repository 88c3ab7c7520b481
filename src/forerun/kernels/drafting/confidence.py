# mypy: allow-untyped-defs, allow-incomplete-defs
"""A linear layer with one output and a sigmoid, over two inputs side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu import functions as cpu
from forerun.kernels.runtime.jit import jit, tl, use_triton

BLOCK = 2048  # inputs that are multiplied at once


def confidences_ref(hidden: Tensor, more: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """Reference implementation of `confidences`."""
    parts = [hidden] if more is None else [hidden, more]
    joined = torch.cat([part.float() for part in parts], -1)
    return F.linear(joined, weight.float(), bias.float()).squeeze(-1).sigmoid()


def confidences(hidden: Tensor, more: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """σ(w · [hidden ; more] + b), in float32.

    Args:
        hidden: [B, D, H]; the last dimension contiguous.
        more: [B, D, r], contiguous, or None.
        weight: [1, H + r] or [1, H].
        bias: [1].

    Returns:
        [B, D] float32.
    """
    if not use_triton(hidden):
        given = [x for x in (hidden, more, weight, bias) if x is not None]
        known = cpu.serve(hidden) and {x.dtype for x in given} == {hidden.dtype}
        return (cpu.confidences if known else confidences_ref)(hidden, more, weight, bias)
    batch, depth, size = hidden.shape
    out = torch.empty(batch, depth, dtype=torch.float32, device=hidden.device)
    _confidences[(depth, batch)](
        hidden, hidden if more is None else more, weight, bias, out, size,
        0 if more is None else more.shape[2], hidden.stride(0), hidden.stride(1),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@jit
def _confidences(
    hidden_ptr, more_ptr, weight_ptr, bias_ptr, out_ptr, size, more_size, batch_stride, row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA per row."""
    row, batch, depth = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    at = batch * depth + row
    hidden_ptr += batch.to(tl.int64) * batch_stride + row.to(tl.int64) * row_stride
    sums = _products(hidden_ptr, weight_ptr, size, BLOCK)
    sums += _products(more_ptr + at.to(tl.int64) * more_size, weight_ptr + size, more_size, BLOCK)
    score = tl.sum(sums, 0) + tl.load(bias_ptr).to(tl.float32)
    tl.store(out_ptr + at, tl.sigmoid(score))


@jit
def _products(x_ptr, weight_ptr, size, BLOCK: tl.constexpr):
    """[BLOCK] float32 sums of x * weight, every BLOCK-th of `size` elements in each."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        sums += x * tl.load(weight_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    return sums
