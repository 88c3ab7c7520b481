# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMSNorm of every head of a linear attention, then a gate: w · x / rms(x) · silu(z)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 until the end.

    Args:
        x: [T, H, D].
        z: [T, H · D], any row stride.
        weight: [D].

    Returns:
        [T, H · D], in x's dtype.
    """
    return gated_rms_norm_ref(x, z, weight, eps)


def gated_rms_norm_ref(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Reference implementation of `gated_rms_norm`."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed.flatten(1) * F.silu(z.float())).to(x.dtype)
