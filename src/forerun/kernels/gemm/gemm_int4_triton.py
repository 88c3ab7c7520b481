# mypy: allow-untyped-defs, allow-incomplete-defs
"""4-bit weights (`int4.py`) in Triton, for any GPU: a GEMM of up to 128 tokens, dequantization.

The layout is that of the Hopper kernel's operands, so a thread finds the integer of its row and
column in a word that seven others read, too: from L1, since a block of 16 rows and a group is 1 KB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl
from forerun.kernels.runtime.pdl import pdl_options

BLOCK_N = 32  # rows of W per CTA: as many CTAs as an H200 has SMs for a weight of 4096 rows
DEQUANTIZE_CHUNKS = 8  # of 64 columns and 16 rows, of a CTA


def num_warps(block_m: int) -> int:
    """Warps of the GEMM: registers for the accumulators."""
    return 4 if block_m <= 32 else 8


def launch(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x [M, K], M <= 128 -> out [M, N]; packed: `PackedInt4`'s."""
    (m, _), groups, n = x.shape, packed.shape[1], out.shape[1]
    assert m <= 128 and x.stride(1) == 1 and packed.is_contiguous() and out.is_contiguous()
    block_m = max(16, 1 << (m - 1).bit_length())
    int4_gemm_kernel[(-(-n // BLOCK_N),)](
        x, packed.view(torch.int32), bias, out, m, n, groups, x.stride(0),
        BLOCK_M=block_m, BLOCK_N=BLOCK_N,
        num_warps=num_warps(block_m), num_stages=1 if gpu_of(x.device).amd else 2, **pdl_options(x),
    )  # fmt: skip


def dequantize(packed: Tensor, out: Tensor) -> None:
    """`PackedInt4.packed` -> out [N, K], rounded to its dtype."""
    blocks, groups, _ = packed.shape
    grid = (blocks, -(-2 * groups // DEQUANTIZE_CHUNKS))
    dequantize_int4_kernel[grid](
        packed.view(torch.int32),
        out,
        groups,
        CHUNKS=DEQUANTIZE_CHUNKS,
        num_warps=4,
        **pdl_options(out),
    )


@jit_no_specialize("M")
def int4_gemm_kernel(
    x,  # [M, K], stride_x
    packed,  # [N / 16, K / 128, 272] int32
    bias,  # [N] or None
    out,  # [M, N]
    M,
    N,
    groups,  # K / 128
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per BLOCK_N columns of `out`. The sums of 64 columns are multiplied by the scales."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, 64)
    mask = m[:, None] < M
    x_tile = x + m[:, None] * stride_x + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for chunk in range(0, 2 * groups):
        xs = tl.load(x_tile + chunk * 64, mask=mask, other=0.0)
        w, scale = _load_chunk(packed, row, chunk, groups)
        w = tl.trans(w.to(x.dtype.element_ty))
        acc += tl.dot(xs, w, input_precision="ieee") * scale[None, :]
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[None, :]
    address = out + m[:, None] * N + n[None, :]
    tl.store(address, acc.to(out.dtype.element_ty), mask=mask & (n[None, :] < N))


@jit
def dequantize_int4_kernel(packed, out, groups, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """One CTA per block of 16 rows by CHUNKS chunks of 64 columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, k = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, 64)
    first = tl.program_id(1) * CHUNKS
    for chunk in range(first, tl.minimum(first + CHUNKS, 2 * groups)):
        w, scale = _load_chunk(packed, row, chunk, groups)
        address = out + row.to(tl.int64)[:, None] * groups * 128 + chunk * 64 + k[None, :]
        tl.store(address, (w * scale[:, None]).to(out.dtype.element_ty))


@jit
def _load_chunk(packed, row, chunk, groups):
    """64 columns of rows of W: (q - zero [rows, 64], scales [rows]), float32."""
    k = tl.arange(0, 64)
    block = packed + ((row // 16).to(tl.int64) * groups + chunk // 2) * 272
    lane = (row % 8 * 4)[:, None] + (k % 8 // 2)[None, :]
    word = chunk % 2 * 128 + (k // 16)[None, :] + lane * 4
    shift = (row % 16 // 8 * 4)[:, None] + (k % 16 // 8 * 8 + k % 2 * 16)[None, :]
    q = (tl.load(block[:, None] + word) >> shift) & 15
    scale_zero = tl.load(block + 256 + row % 16)
    zero = scale_zero & 255
    scale = (scale_zero - zero).to(tl.float32, bitcast=True)
    return (q - zero[:, None]).to(tl.float32), scale
