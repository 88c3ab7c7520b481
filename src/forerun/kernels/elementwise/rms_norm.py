# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMSNorm, alone and with the residual addition before it: x / sqrt(mean(x^2) + eps) * w.

The addend may come as partials [S, T, N], float32 (split-K) or of the model's dtype (outputs of
experts): then reduction, addition and norm are one kernel. Statistics and sums are float32.
(arXiv 1910.07467)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.elementwise import add_rms_norm_sm90
from forerun.kernels.runtime.gpu import vector_warps
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options


def sum_split_k_ref(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Split-K partials [S, T, N] summed, in `dtype`; [T, N] is returned as it is."""
    return x if x.dim() == 2 else x.float().sum(0).to(dtype)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> the same shape and dtype; it is computed in the weight's."""
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `add_rms_norm`."""
    total = residual + sum_split_k_ref(x, residual.dtype)
    return rms_norm_ref(total, weight, eps), total


def rms_norm(x: Tensor, weight: Tensor, eps: float, as_partials: bool = False) -> Tensor:
    """x [..., N], weight [N], any float dtype -> x's shape and dtype. Rows of [T, N] may have any
    stride.

    `as_partials`: squares are added up in the order in which `add_rms_norm` does so of partials.
    """
    if not use_triton(x):
        return rms_norm_ref(x, weight, eps)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, eps, None, out, as_partials)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x and its RMSNorm.

    Args:
        x: [T, N], or partials [S, T, N], whose sum is rounded to their dtype.
        residual: [T, N], any row stride; not written.
        weight: [N], any float dtype.

    Returns:
        (normed, total), [T, N] each, in residual's dtype.
    """
    if not use_triton(residual):
        return add_rms_norm_ref(x, residual, weight, eps)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(out)
    if add_rms_norm_sm90.fits(x, residual, weight):
        add_rms_norm_sm90.launch(x, residual, weight, eps, total, out)
        return out, total
    _launch(x, residual, weight, eps, total, out)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    total: Tensor | None,
    out: Tensor,
    as_partials: bool = False,
) -> None:
    rows, size = out.shape
    block = triton.next_power_of_2(size)
    add, split_k = residual is not None, x.shape[0] if x.dim() == 3 else 1
    warps = vector_warps(block, out)
    _rms_norm[(rows,)](
        x,
        residual if add else x,
        weight,
        total if add else out,
        out,
        size,
        x.stride(0) if x.dim() == 3 else 0,
        x.stride(-2),
        residual.stride(0) if residual is not None else 0,
        eps,
        ADD=add,
        SPLIT_K=split_k,
        BLOCK=block,
        # Without partials: 32 elements per thread, so that all CTAs of 512 tokens run at once.
        num_warps=warps if split_k > 1 or as_partials or block > 4096 else max(1, warps // 4),
        **pdl_options(out),
    )


@jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    size,
    split_stride,
    row_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per token."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:  # no kernel writes the weight
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_ptr += row * row_stride
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, SPLIT_K):
        x_ptr += split_stride  # S * T * N may exceed 2^31
        x += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SPLIT_K > 1:
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if ADD:
        residual_ptr += row * residual_stride
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        # Normalise the rounded sum, which is what the next layer reads.
        x = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * size + at, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    out = x * scale * weight
    tl.store(out_ptr + row * size + at, out.to(out_ptr.dtype.element_ty), mask=inside)
