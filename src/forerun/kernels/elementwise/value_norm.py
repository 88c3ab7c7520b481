# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMSNorm of every value head, without a weight, in place in the output of the QKV GEMM (Gemma 4).

QK-norm, RoPE and the K/V write follow in a kernel of their own (`qk_norm_rope.py`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.runtime.gpu import vector_warps
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options


def norm_values_ref(qkv: Tensor, num_kv_heads: int, head_dim: int, eps: float) -> None:
    """Reference implementation of `norm_values`: computed in float32, rounded once."""
    values = qkv[:, -num_kv_heads * head_dim :].unflatten(1, (num_kv_heads, head_dim))
    values.copy_(F.rms_norm(values.float(), (head_dim,), None, eps))


def norm_values(qkv: Tensor, num_kv_heads: int, head_dim: int, eps: float) -> None:
    """Divides every value head by its root mean square.

    Args:
        qkv: [T, ... + Hkv * D], any row stride: the value heads are its last columns.
        num_kv_heads: Hkv.
        head_dim: D.
        eps: added to the mean square.
    """
    if not use_triton(qkv):
        norm_values_ref(qkv, num_kv_heads, head_dim, eps)
        return
    block = triton.next_power_of_2(head_dim)
    _norm_values[(qkv.shape[0], num_kv_heads)](
        qkv, qkv.shape[1] - num_kv_heads * head_dim, qkv.stride(0), eps,
        DIM=head_dim, BLOCK=block, num_warps=vector_warps(block, qkv), **pdl_options(qkv),
    )  # fmt: skip


@jit
def _norm_values(
    x_ptr, first, row_stride, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One CTA per token and head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, BLOCK)
    at = x_ptr + tl.program_id(0).to(tl.int64) * row_stride + first + tl.program_id(1) * DIM + i
    x = tl.load(at, mask=i < DIM, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=i < DIM)
