"""RMSNorm on a CPU, alone and with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.cpu.library import call


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> the same shape and dtype; computed in float32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, eps, None, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(residual + x), residual + x) of x and residual [T, N], new tensors."""
    x, residual = x.contiguous(), residual.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, eps, total, out)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    total: Tensor | None,
    out: Tensor,
) -> None:
    size = x.shape[-1]
    call(
        "forerun_rms_norm", x.data_ptr(), None if residual is None else residual.data_ptr(),
        weight.data_ptr(), x.numel() // size, size, eps,
        None if total is None else total.data_ptr(), out.data_ptr(), x.dtype == torch.bfloat16,
    )  # fmt: skip
