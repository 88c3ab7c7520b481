# mypy: allow-untyped-defs, allow-incomplete-defs
"""A GEMM per attention head with few tokens: MLA's absorbed projections in decode and verify steps.

out[t, h] = x[t, h] W_h. There are as many GEMMs as heads, and each is small: 16 heads of 128 by 512
values are 2 MB of weights, so the time is that of latencies, not of memory bandwidth.

A CTA has one tile of W_h, K by BLOCK_N, and loads it into shared memory before it waits for the
preceding kernel (PDL). Then it takes 16 tokens at a time. Each of its four warps has a quarter of
K (split-K within the CTA): with K = 512, a chain of 32 dependent MMAs would take longer than the
loads.

Every tile of tokens goes through the same instructions, and the slices of K are added up in one
order. So a token's result depends neither on the number of tokens nor on its position among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.gpu import GpuInfo, gpu_of, next_power_of_2
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

MAX_TOKENS, MAX_HEADS = 32, 32  # more go to cuBLAS, which is faster there
BLOCK_M = 16  # tokens of a tile
SPLIT_K = 4  # slices of K, one per warp
MAX_BLOCK_N = 128  # columns of a CTA; the partials of all slices are in registers
MAX_TILE_BYTES = 64 << 10  # of W per CTA; half of it in float32, which has no tensor cores
CTAS_PER_SM = 4  # the grid is split along T while there are fewer CTAs


def head_gemm_ref(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Reference implementation of `head_gemm`."""
    x, target = x.transpose(0, 1), out.transpose(0, 1)
    if out.is_cuda:  # without a copy
        torch.bmm(x, weight, out=target)
    else:  # compiled CPU steps take no strided `out`
        target.copy_(torch.bmm(x, weight))


def head_gemm(x: Tensor, weight: Tensor, out: Tensor, fixed_order: bool = False) -> None:
    """out[t, h] = x[t, h] weight[h] for each head h; sums are float32 and rounded once.

    More than `MAX_TOKENS` tokens or `MAX_HEADS` heads go to `torch.bmm`, but in a fixed order. With
    programmatic dependent launch, the weight is read before the kernel waits for its predecessor.

    Args:
        x: [T, H, K], tokens and heads at any stride.
        weight: [H, K, N] of x's dtype, with K or N contiguous; no kernel of a step writes it.
        out: [T, H, N], tokens and heads at any stride, written; must not overlap x.
        fixed_order: a token has the same result among any number of tokens.
    """
    if not use_triton(x) or not (fixed_order or _fits(x, gpu_of(x.device))):
        head_gemm_ref(x, weight, out)
    else:
        _launch(x, weight, out)


def _launch(x: Tensor, weight: Tensor, out: Tensor) -> None:
    assert x.stride(2) == 1 and out.stride(2) == 1
    (tokens, heads, k), n, gpu = x.shape, weight.shape[2], gpu_of(x.device)
    block_n = choose_block_n(gpu, weight)
    tiles = -(-n // block_n)
    token_ctas = min(-(-tokens // BLOCK_M), max(1, CTAS_PER_SM * gpu.num_sms // (tiles * heads)))
    _head_gemm[(tiles, heads, token_ctas)](
        x, weight, out, tokens, x.stride(0), x.stride(1), *weight.stride(),
        out.stride(0), out.stride(1),
        K=k, N=n, BLOCK_M=BLOCK_M, BLOCK_N=block_n, SPLIT_K=SPLIT_K, BLOCK_K=slice_width(k),
        num_warps=SPLIT_K, num_stages=1 if gpu.amd else 2, **pdl_options(x),
    )  # fmt: skip


def _fits(x: Tensor, gpu: GpuInfo) -> bool:
    """RDNA has no matrix instruction for float32, and too few registers without one."""
    rdna = gpu.amd and gpu.warp_size == 32
    few = x.shape[0] <= MAX_TOKENS and x.shape[1] <= MAX_HEADS
    return few and not (rdna and x.dtype == torch.float32)


def slice_width(k: int) -> int:
    """Values of K per slice, padded to what an MMA takes."""
    return max(16, next_power_of_2(-(-k // SPLIT_K)))


def choose_block_n(gpu: GpuInfo, weight: Tensor) -> int:
    """Columns of a CTA for weight [H, K, N], whatever T: the most with CTAs for 3/4 of the SMs."""
    heads, k, n = weight.shape
    column_bytes = SPLIT_K * slice_width(k) * weight.itemsize
    most = min(MAX_TILE_BYTES, gpu.smem_bytes // 2) // (2 if weight.itemsize > 2 else 1)
    block = max(16, min(next_power_of_2(n), MAX_BLOCK_N))
    while block > 16 and (
        block * column_bytes > most or 4 * heads * -(-n // block) < 3 * gpu.num_sms
    ):
        block //= 2
    return block


@jit_no_specialize("T")
def _head_gemm(
    x,  # [T, H, K]
    w,  # [H, K, N]
    out,  # [T, H, N]
    T,
    x_token_stride,
    x_head_stride,
    w_head_stride,
    w_k_stride,
    w_n_stride,
    out_token_stride,
    out_head_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of a slice
    PDL: tl.constexpr,
):
    """One CTA per tile of N, head, and every so many tiles of tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile, head = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, SPLIT_K)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_mask, n_mask = k < K, n < N
    w_tile = w + head * w_head_stride + k[:, :, None] * w_k_stride + n[None, None, :] * w_n_stride
    if K == SPLIT_K * BLOCK_K and N % BLOCK_N == 0:
        ws = tl.load(w_tile)
    else:
        ws = tl.load(w_tile, mask=k_mask[:, :, None] & n_mask[None, None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_tile = x + head * x_head_stride + k[:, None, :]
    out_tile = out + head * out_head_stride + n[None, :]
    for first in range(tl.program_id(2) * BLOCK_M, T, tl.num_programs(2) * BLOCK_M):
        m = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        m_mask = m < T
        mask = m_mask[None, :, None]
        if K != SPLIT_K * BLOCK_K:
            mask = mask & k_mask[:, None, :]
        xs = tl.load(x_tile + m[None, :, None] * x_token_stride, mask=mask, other=0.0)
        acc = _sum_slices(tl.dot(xs, ws, input_precision="ieee"))
        address = out_tile + m[:, None] * out_token_stride
        tl.store(address, acc.to(out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])


@jit
def _sum_slices(acc):
    """[4, M, N] -> [M, N]: (0 + 1) + (2 + 3)."""
    acc = tl.reshape(tl.permute(acc, (1, 2, 0)), (acc.shape[1], acc.shape[2], 2, 2))
    even, odd = tl.split(acc)
    first, second = tl.split(even + odd)
    return first + second
