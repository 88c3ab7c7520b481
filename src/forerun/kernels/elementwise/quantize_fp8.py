# mypy: allow-untyped-defs, allow-incomplete-defs
"""Quantizes the input of many tokens' GEMMs: e4m3 with a scale per token, or per token and 128
columns, and weights out of e4m3.
"""

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
    encode_e4m3_ref,
    fp8_mode,
    to_e4m3,
)
from forerun.kernels.runtime.gpu import next_power_of_2
from forerun.kernels.runtime.jit import jit, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 1024  # elements per iteration, of longer tokens
GROUP = 128  # columns that share a scale, of `quantize_groups`
SHORT = 2048  # columns of a token, at most, of which a CTA has several
ROWS_BLOCK, ROWS_WARPS = 4096, 8  # elements of a CTA, of short tokens and of groups


def interleave(values: Tensor) -> Tensor:
    """[R, K] with columns reordered within every 128, as `gemm_fp8_sm90.cu` reads a weight.

    Byte 32 t + 16 h + 4 s + 2 v + u is column 64 h + 16 s + 8 u + 2 t + v: in step s of half h,
    thread t of four has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16 (PTX ISA, wgmma's register
    fragments).
    """
    columns: Tensor = values.view(torch.uint8).unflatten(1, (-1, 2, 4, 2, 4, 2))  # h, s, u, t, v
    return columns.permute(0, 1, 5, 2, 3, 6, 4).flatten(1).contiguous().view(values.dtype)


def deinterleave(values: Tensor) -> Tensor:
    """The inverse of `interleave`."""
    columns: Tensor = values.view(torch.uint8).unflatten(1, (-1, 4, 2, 4, 2, 2))  # t, h, s, v, u
    return columns.permute(0, 1, 3, 4, 6, 2, 5).flatten(1).contiguous().view(values.dtype)


def quantize_tokens_ref(x: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Reference implementation of `quantize_tokens`."""
    scale = x.float().abs().amax(1, keepdim=True) / E4M3_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    values = encode_e4m3_ref(x.float() / scale)
    return interleave(values) if interleaved else values, scale


def quantize_tokens(x: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (e4m3 [T, K], scales [T, 1] float32): x = e4m3 · scale, rounded.

    A scale is the token's largest absolute value / 448, or 1 for a token of zeros. A NaN or an
    infinity makes the scale NaN or infinite, and the token's results NaN.

    Args:
        interleaved: columns are reordered by `interleave`; K is a multiple of 128.
    """
    if not use_triton(x):
        return quantize_tokens_ref(x, interleaved)
    assert x.stride(1) == 1 and (x.shape[1] % 128 == 0 or not interleaved)
    tokens, k = x.shape
    out = torch.empty(tokens, k, dtype=FP8, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    if k <= SHORT:
        block_k = max(128, next_power_of_2(k))
        rows = ROWS_BLOCK // block_k
        _quantize_short_tokens[(-(-tokens // rows),)](
            x, as_bits(out), scales, tokens, k, x.stride(0),
            INTERLEAVED=interleaved, NATIVE=fp8_mode(out) == 2, ROWS=rows, BLOCK_K=block_k,
            num_warps=ROWS_WARPS, **pdl_options(x),
        )  # fmt: skip
        return out, scales
    _quantize_tokens[(tokens,)](
        x, as_bits(out), scales, k, x.stride(0),
        INTERLEAVED=interleaved, NATIVE=fp8_mode(out) == 2, BLOCK=BLOCK, num_warps=4,
        **pdl_options(x),
    )  # fmt: skip
    return out, scales


@jit
def _quantize_short_tokens(
    x_ptr, out_ptr, scales_ptr, tokens, k, row_stride,
    INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One CTA for ROWS tokens, which it reads once."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    mask = (row < tokens)[:, None] & (at < k)[None, :]
    wide = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + wide * row_stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = scales_of_rows(x)
    tl.store(scales_ptr + row, scale, mask=row < tokens)
    bits = to_e4m3(x / scale[:, None], NATIVE)
    if INTERLEAVED:
        GROUPS: tl.constexpr = ROWS * BLOCK_K // 128
        bits = tl.reshape(bits, (GROUPS, 128))
        bits = tl.reshape(interleave_groups(bits, GROUPS), (ROWS, BLOCK_K))
    tl.store(out_ptr + wide * k + at[None, :], bits, mask=mask)


@jit
def _quantize_tokens(
    x_ptr, out_ptr, scales_ptr, k, row_stride,
    INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
        x = tl.load(x_ptr + row * row_stride + at, mask=at < k, other=0.0).to(tl.float32)
        bits = to_e4m3(x / scale, NATIVE)
        if INTERLEAVED:
            bits = tl.reshape(bits, (BLOCK // 128, 2, 4, 2, 4, 2))  # h, s, u, t, v
            bits = tl.reshape(tl.permute(bits, (0, 4, 1, 2, 5, 3)), (BLOCK,))
        tl.store(out_ptr + row * k + at, bits, mask=at < k)


def quantize_groups_ref(x: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Reference implementation of `quantize_groups`."""
    groups = x.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / E4M3_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    values = encode_e4m3_ref(groups / scale.unsqueeze(2)).flatten(1)
    return interleave(values) if interleaved else values, scale


def quantize_groups(x: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """`quantize_tokens` with scales [T, K / 128], one per token and 128 columns."""
    if not use_triton(x):
        return quantize_groups_ref(x, interleaved)
    tokens, k = x.shape
    assert x.is_contiguous() and k % GROUP == 0
    out = torch.empty(tokens, k, dtype=FP8, device=x.device)
    scales = torch.empty(tokens, k // GROUP, dtype=torch.float32, device=x.device)
    _quantize_groups[(-(-x.numel() // ROWS_BLOCK),)](
        x, as_bits(out), scales, x.numel(),
        INTERLEAVED=interleaved, NATIVE=fp8_mode(out) == 2, BLOCK=ROWS_BLOCK,
        num_warps=ROWS_WARPS, **pdl_options(x),
    )  # fmt: skip
    return out, scales


@jit
def _quantize_groups(
    x_ptr, out_ptr, scales_ptr, n,
    INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK elements, which are whole groups."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    group = tl.program_id(0) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
    at = group.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    scale = scales_of_rows(x)
    tl.store(scales_ptr + group, scale, mask=group < n // 128)
    bits = to_e4m3(x / scale[:, None], NATIVE)
    if INTERLEAVED:
        bits = interleave_groups(bits, BLOCK // 128)
    tl.store(out_ptr + at, bits, mask=at < n)


@jit
def scales_of_rows(x):
    """[M, K] -> [M]."""
    size = tl.abs(x)
    scale = tl.max(size, 1) / 448.0
    scale = tl.where(tl.sum((size != size).to(tl.int32), 1) > 0, float("nan"), scale)
    return tl.where(scale == 0.0, 1.0, scale)


@jit
def interleave_groups(bits, ROWS: tl.constexpr):
    """[ROWS, 128], every row in the order of `interleave`."""
    bits = tl.reshape(bits, (ROWS, 2, 4, 2, 4, 2))  # h, s, u, t, v
    return tl.reshape(tl.permute(bits, (0, 4, 1, 2, 5, 3)), (ROWS, 128))


def dequantize_weight_ref(
    weight: Fp8Weight, dtype: torch.dtype, interleaved: bool = False
) -> Tensor:
    """Reference implementation of `dequantize_weight`."""
    if interleaved:
        weight = replace(weight, values=deinterleave(weight.values))
    return weight.dequantize().to(dtype)


def dequantize_weight(weight: Fp8Weight, dtype: torch.dtype, interleaved: bool = False) -> Tensor:
    """[N, K] in `dtype`; `interleaved`: the values are stored by `interleave`."""
    if not use_triton(weight.values):
        return dequantize_weight_ref(weight, dtype, interleaved)
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    _dequantize_weight[(n, -(-k // BLOCK))](
        as_bits(weight.values), weight.scales, out, k, weight.group, weight.scales.shape[1],
        INTERLEAVED=interleaved, BLOCK=BLOCK, num_warps=4, **pdl_options(out),
    )  # fmt: skip
    return out


@jit
def _dequantize_weight(
    values, scales, out, k, group, num_groups,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK columns of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(values + row * k + at, mask=at < k, other=0)
    if INTERLEAVED:
        bits = tl.reshape(bits, (BLOCK // 128, 4, 2, 4, 2, 2))  # t, h, s, v, u
        bits = tl.reshape(tl.permute(bits, (0, 2, 3, 5, 1, 4)), (BLOCK,))
    scale = tl.load(scales + row * num_groups + at // group, mask=at < k, other=0.0)
    value = decode_e4m3(bits).to(tl.float32) * scale
    tl.store(out + row * k + at, value.to(out.dtype.element_ty), mask=at < k)
