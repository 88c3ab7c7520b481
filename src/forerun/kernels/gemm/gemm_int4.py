"""GEMM with weights of 4-bit integers (`int4.py`): y = x Wᵀ.

- `gemm_int4_sm90.py`, in CUDA C++, for Hopper and bfloat16;
- `gemm_int4_triton.py`, for any GPU;
- more than 128 tokens: the weight is dequantized into a workspace, for the library's GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.elementwise.gated_act import silu_mul as split_silu_mul
from forerun.kernels.gemm import gemm_int4_sm90, gemm_int4_triton
from forerun.kernels.gemm.int4 import BLOCK_ROWS, GROUP, PackedInt4, dequantize_int4_ref
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import use_triton

MAX_M = 128


def gemm_int4_ref(x: Tensor, weight: PackedInt4, silu_mul: bool = False) -> Tensor:
    """Reference implementation of `gemm_int4`, in float32."""
    y = F.linear(x.float(), dequantize_int4_ref(weight.packed))
    y = y if weight.bias is None else y + weight.bias.float()
    if silu_mul:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y


def gemm_int4(x: Tensor, weight: PackedInt4, silu_mul: bool = False) -> Tensor:
    """x [M, K] -> x Wᵀ + b, [M, N]. `silu_mul`: W = [gate; up], [M, N / 2].

    Up to 128 tokens, our kernels read the 4-bit integers, and a token's result does not depend on
    the number of tokens; beyond, W is dequantized to x's dtype for the library's GEMM.
    """
    if not use_triton(x):
        return gemm_int4_ref(x, weight, silu_mul).to(x.dtype)
    (m, _), (n, k) = x.shape, weight.shape
    if m > MAX_M:
        y = F.linear(x, dequantize_int4(weight.packed, x.dtype), weight.bias)
        return split_silu_mul(y, y.dtype) if silu_mul else y
    config = gemm_int4_sm90.choose_config(n, k, silu_mul, gpu_of(x.device), x.dtype)
    if config is not None:
        out = x.new_empty(m, n // (1 + silu_mul))
        gemm_int4_sm90.launch(config, x, weight, out, silu_mul)
        return out
    out = x.new_empty(m, n)
    gemm_int4_triton.launch(x, weight.packed, weight.bias, out)
    return split_silu_mul(out, out.dtype) if silu_mul else out


def gemm_int4_partials(x: Tensor, weight: PackedInt4) -> Tensor | None:
    """x Wᵀ as split-K partials [S, M, N] float32, which the reader adds up; the bias is not added.

    None: another kernel computes it.
    """
    (m, _), (n, k) = x.shape, weight.shape
    if not use_triton(x) or m > MAX_M:
        return None
    config = gemm_int4_sm90.choose_config(n, k, False, gpu_of(x.device), x.dtype, partials=True)
    if config is None:
        return None
    partials = torch.empty(config.split_k, m, n, dtype=torch.float32, device=x.device)
    gemm_int4_sm90.launch(config, x, weight, partials)
    return partials


def dequantize_int4(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """`PackedInt4.packed` -> W [N, K], rounded."""
    if not use_triton(packed):
        return dequantize_int4_ref(packed).to(dtype)
    blocks, groups, _ = packed.shape
    out = torch.empty(blocks * BLOCK_ROWS, groups * GROUP, dtype=dtype, device=packed.device)
    gemm_int4_triton.dequantize(packed, out)
    return out
