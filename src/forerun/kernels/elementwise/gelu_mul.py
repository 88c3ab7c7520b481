# mypy: allow-untyped-defs, allow-incomplete-defs
"""GELU(gate) * up (GeGLU, arXiv 2002.05202) with GELU's tanh form, from the output of a GEMM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.runtime.gpu import vector_warps
from forerun.kernels.runtime.jit import jit, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 2048  # elements of a token that a CTA computes


def gelu_tanh_mul_ref(gate_up: Tensor) -> Tensor:
    """Reference implementation of `gelu_tanh_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], gate first -> [T, I]."""
    if not use_triton(gate_up):
        return gelu_tanh_mul_ref(gate_up)
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    _gelu_tanh_mul[(rows, -(-inner // BLOCK))](
        gate_up,
        out,
        inner,
        gate_up.stride(0),
        BLOCK=BLOCK,
        num_warps=vector_warps(BLOCK, out),
        **pdl_options(out),
    )
    return out


@jit
def _gelu_tanh_mul(
    x_ptr, out_ptr, inner, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One CTA per BLOCK elements of a token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate_ptr = x_ptr + row * row_stride + at
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + inner, mask=inside, other=0.0).to(tl.float32)
    # 0.5 (1 + tanh(z)) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
    twice = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    out = gate / (1.0 + tl.exp(-twice)) * up
    tl.store(out_ptr + row * inner + at, out.to(out_ptr.dtype.element_ty), mask=inside)
