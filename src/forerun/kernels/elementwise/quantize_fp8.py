# mypy: allow-untyped-defs, allow-incomplete-defs
"""Activations in e4m3 with a scale per token, for GEMMs of many tokens on FP8 tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.fp8 import E4M3_MAX, FP8, as_bits, encode_e4m3, encode_e4m3_ref
from forerun.kernels.runtime.jit import jit, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 1024  # elements per iteration


def quantize_tokens_ref(x: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Reference implementation of `quantize_tokens`."""
    x = x if order is None else x[:, order]
    scale = x.float().abs().amax(1, keepdim=True) / E4M3_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    return encode_e4m3_ref(x.float() / scale), scale


def quantize_tokens(x: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (e4m3 [T, K], scales [T, 1] float32): x = e4m3 · scale, rounded.

    `order` [K] int64: column i of the result is column order[i] of x.

    A scale is the token's largest absolute value / 448, or 1 for a token of zeros. A NaN or an
    infinity makes the scale NaN or infinite, and the token's results NaN.
    """
    if not use_triton(x):
        return quantize_tokens_ref(x, order)
    assert x.stride(1) == 1
    tokens, k = x.shape
    out = torch.empty(tokens, k, dtype=FP8, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    _quantize_tokens[(tokens,)](
        x, as_bits(out), scales, order, k, x.stride(0), BLOCK=BLOCK, num_warps=4, **pdl_options(x)
    )
    return out, scales


@jit
def _quantize_tokens(
    x_ptr, out_ptr, scales_ptr, order_ptr, k, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One CTA per token; the second pass over the token finds it in L1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, k, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * row_stride + at, mask=at < k, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    scale = tl.max(largest, 0) / 448.0
    scale = tl.where(tl.sum((largest != largest).to(tl.int32), 0) > 0, float("nan"), scale)
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales_ptr + row, scale)
    for first in range(0, k, BLOCK):
        at = first + tl.arange(0, BLOCK)
        column = at
        if order_ptr is not None:
            column = tl.load(order_ptr + at, mask=at < k, other=0)
        x = tl.load(x_ptr + row * row_stride + column, mask=at < k, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * k + at, encode_e4m3(x / scale), mask=at < k)
