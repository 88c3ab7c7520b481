# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped dynamic convolution over the rows of blocks (`models/block_convolution.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl, use_triton

BLOCK = 1024  # channels that a CTA computes


def convolve_rows_ref(x: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
    """Reference implementation of `convolve_rows`."""
    rows, values = x.shape[1], x.float()
    group = x.shape[2] // dynamic.shape[3]
    kernels = base.float() + dynamic.float().repeat_interleave(group, -1)
    out = kernels[:, :, 0] * values
    for tap in range(1, min(kernels.shape[2], rows)):
        out[:, tap:] += kernels[:, tap:, tap] * values[:, : rows - tap]
    return out.to(x.dtype)


def convolve_rows(x: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
    """out[b, i, c] = Σ_{t <= i} (base[t, c] + dynamic[b, i, t, group of c]) · x[b, i - t, c].

    Args:
        x: [B, R, H], contiguous.
        base: [K, H].
        dynamic: [B, R, K, n], contiguous but for the rows' stride; H / n channels are a group.

    Returns:
        [B, R, H] in x's dtype; sums are float32.
    """
    if not use_triton(x):
        return convolve_rows_ref(x, base, dynamic)
    batch, rows, size = x.shape
    taps, groups = dynamic.shape[2:]
    out = torch.empty_like(x)
    _convolve_rows[(batch * rows, -(-size // BLOCK))](
        x, base, dynamic, out, rows, size, groups, size // groups, dynamic.stride(1),
        TAPS=taps, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@jit
def _convolve_rows(
    x_ptr, base_ptr, dynamic_ptr, out_ptr, rows, size, groups, group_size, row_stride,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < size
    in_block = row % rows
    out = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        some = inside & (in_block >= tap)
        kernel = tl.load(base_ptr + tap * size + c, mask=some, other=0.0).to(tl.float32)
        own = dynamic_ptr + row * row_stride + tap * groups + c // group_size
        kernel += tl.load(own, mask=some, other=0.0).to(tl.float32)
        out += kernel * tl.load(x_ptr + (row - tap) * size + c, mask=some, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + c, out.to(out_ptr.dtype.element_ty), mask=inside)
