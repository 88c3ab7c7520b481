# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMSNorm of every head of a linear attention, then a gate: w · x / rms(x) · silu(z)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu import linear_attention as cpu
from forerun.kernels.cpu.library import serves
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

GROUP = 4  # heads of a CTA


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norms and gates, in float32 until the end.

    Args:
        x: [T, H, D].
        z: [T, H · D], any row stride.
        weight: [D].

    Returns:
        [T, H · D], in x's dtype.
    """
    if not use_triton(x):
        if serves(x.dtype, x.device) and weight.dtype == x.dtype:
            return cpu.gated_rms_norm(x.contiguous(), z, weight, eps)
        return gated_rms_norm_ref(x, z, weight, eps)
    tokens, heads, dim = x.shape
    assert x.is_contiguous() and z.stride(1) == 1
    out = torch.empty(tokens, heads * dim, dtype=x.dtype, device=x.device)
    _gated_rms_norm[(tokens, triton.cdiv(heads, GROUP))](
        x, z, weight, out, heads, z.stride(0), eps,
        DIM=dim, GROUP=GROUP, BLOCK=triton.next_power_of_2(dim),
        num_warps=1, **pdl_options(x),
    )  # fmt: skip
    return out


def gated_rms_norm_ref(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Reference implementation of `gated_rms_norm`."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed.flatten(1) * F.silu(z.float())).to(x.dtype)


@jit
def _gated_rms_norm(
    x_ptr, z_ptr, weight_ptr, out_ptr, heads, z_stride, eps,
    DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per GROUP heads of a token."""
    i = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + i, mask=i < DIM, other=0.0).to(tl.float32)
    if PDL:  # no kernel writes the weight
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    inside = (head < heads) & (i < DIM)
    at = head * DIM + i
    x = tl.load(x_ptr + token * heads * DIM + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    out = x * scale * weight * z / (1.0 + tl.exp(-z))
    tl.store(out_ptr + token * heads * DIM + at, out.to(out_ptr.dtype.element_ty), mask=inside)
