# mypy: allow-untyped-defs, allow-incomplete-defs
"""SiLU(gate) * up (SwiGLU) and GELU(gate) * up (GeGLU), from the output of the gate/up GEMM.

GELU is in its tanh form (arXiv 2002.05202).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu.functions import gelu_tanh
from forerun.kernels.elementwise.rms_norm import sum_split_k_ref
from forerun.kernels.runtime.gpu import vector_warps
from forerun.kernels.runtime.jit import jit, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 2048  # elements of a token that a CTA computes


def silu_mul_ref(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """Reference implementation of `silu_mul`."""
    gate, up = sum_split_k_ref(gate_up, dtype).chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul_ref(gate_up: Tensor) -> Tensor:
    """Reference implementation of `gelu_tanh_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return gelu_tanh(gate).mul_(up)


def silu_mul(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """gate_up [T, 2I], gate first, or split-K partials, float32 [S, T, 2I] -> [T, I] in `dtype`."""
    if not use_triton(gate_up):
        return silu_mul_ref(gate_up, dtype)
    return _launch(gate_up, dtype, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], gate first -> [T, I]."""
    if not use_triton(gate_up):
        return gelu_tanh_mul_ref(gate_up)
    return _launch(gate_up, gate_up.dtype, gelu=True)


def _launch(gate_up: Tensor, dtype: torch.dtype, gelu: bool) -> Tensor:
    rows, inner = gate_up.shape[-2], gate_up.shape[-1] // 2
    out = torch.empty(rows, inner, dtype=dtype, device=gate_up.device)
    _act_mul[(rows, -(-inner // BLOCK))](
        gate_up,
        out,
        inner,
        gate_up.stride(0) if gate_up.dim() == 3 else 0,
        gate_up.stride(-2),
        SPLIT_K=gate_up.shape[0] if gate_up.dim() == 3 else 1,
        GELU=gelu,
        BLOCK=BLOCK,
        num_warps=vector_warps(BLOCK, out),
        **pdl_options(out),
    )
    return out


@jit
def gate_by(gate, up, GELU: tl.constexpr):
    """The activation of gate, times up, float32."""
    if GELU:  # 0.5 (1 + tanh(z)) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        twice = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        return gate / (1.0 + tl.exp(-twice)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def _act_mul(
    x_ptr, out_ptr, inner, split_stride, row_stride,
    SPLIT_K: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
    for split in tl.static_range(1, SPLIT_K):
        gate += tl.load(gate_ptr + split * split_stride, mask=inside, other=0.0)
        up += tl.load(gate_ptr + split * split_stride + inner, mask=inside, other=0.0)
    out = gate_by(gate, up, GELU)
    tl.store(out_ptr + row * inner + at, out.to(out_ptr.dtype.element_ty), mask=inside)
