"""Residual addition and RMSNorm of few tokens' partials (`add_rms_norm_sm90.cu`), by NVRTC.

The outputs of a token's experts are as many partials as there are choices, 64 KB with 8 of 2,048
columns, which one CTA takes a while to load. Here a cluster of 8 CTAs loads them, each a slice of
the columns, and exchanges sums of squares through shared memory. A warp does what a warp of the
Triton kernel does, so that a token has the same bits in a batch of any size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import gpu_of

SOURCE = Path(__file__).with_name("add_rms_norm_sm90.cu")
HIDDEN = (2048, 4096)  # 8 and 16 warps of 8 columns per lane
CLUSTER = 8  # CTAs
MAX_TOKENS = 64


def fits(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Whether `launch` can serve, and should: partials x [S, T, N] and residual [T, N]."""
    if x.dim() != 3 or x.shape[0] < 2 or x.shape[2] not in HIDDEN:
        return False
    if x.shape[1] > MAX_TOKENS or x.dtype != torch.float32 or not x.is_cuda:
        return False
    dtypes = residual.dtype == weight.dtype == torch.bfloat16
    tensors = (x, residual, weight)
    gpu = gpu_of(x.device)
    return (
        dtypes
        and gpu.capability == 90
        and not gpu.amd
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
        and nvrtc.available()
    )


def cuda_source(hidden: int, num_parts: int) -> str:
    """`add_rms_norm_sm90.cu` with its configuration as macros in front, ready to compile."""
    return nvrtc.with_macros(SOURCE, {"HIDDEN": hidden, "NORM_PARTS": num_parts})


def launch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor, out: Tensor
) -> None:
    """Launches `add_rms_norm`, into total and out [T, N]."""
    num_parts, tokens, hidden = x.shape
    kernel = _load_kernel(x.device, hidden, num_parts)
    args = (x, residual, weight, total, out, tokens, float(eps))
    nvrtc.launch(kernel, CLUSTER * tokens, hidden // 64, args, x.device)


_load_kernel = nvrtc.loader("add_rms_norm_sm90_kernel", cuda_source)
