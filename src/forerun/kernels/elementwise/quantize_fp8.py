# mypy: allow-untyped-defs, allow-incomplete-defs
"""For GEMMs of many tokens: activations in e4m3 with a scale per token, and weights out of e4m3."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.kernels.runtime.fp8 import (
    E4M3_MAX,
    FP8,
    as_bits,
    decode_e4m3,
    encode_e4m3,
    encode_e4m3_ref,
)
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


def dequantise_weight_ref(
    weight: Fp8Weight, dtype: torch.dtype, place: Tensor | None = None
) -> Tensor:
    """Reference implementation of `dequantise_weight`."""
    if place is not None:
        weight = replace(weight, values=weight.values.view(torch.uint8)[:, place].view(FP8))
    return weight.dequantise().to(dtype)


def dequantise_weight(weight: Fp8Weight, dtype: torch.dtype, place: Tensor | None = None) -> Tensor:
    """[N, K] in `dtype`. `place` [K] int64: column i of the weight is stored at place[i]."""
    if not use_triton(weight.values):
        return dequantise_weight_ref(weight, dtype, place)
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    _dequantise_weight[(n, -(-k // BLOCK))](
        as_bits(weight.values), weight.scales, place, out, k, weight.group,
        weight.scales.shape[1], BLOCK=BLOCK, num_warps=4, **pdl_options(out),
    )  # fmt: skip
    return out


@jit
def _dequantise_weight(
    values, scales, place_ptr, out, k, group, num_groups, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One CTA per BLOCK columns of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stored = at
    if place_ptr is not None:
        stored = tl.load(place_ptr + at, mask=at < k, other=0)
    scale = tl.load(scales + row * num_groups + at // group, mask=at < k, other=0.0)
    value = decode_e4m3(tl.load(values + row * k + stored, mask=at < k, other=0))
    tl.store(
        out + row * k + at, (value.to(tl.float32) * scale).to(out.dtype.element_ty), mask=at < k
    )
