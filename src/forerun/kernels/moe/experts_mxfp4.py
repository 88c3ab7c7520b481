# mypy: allow-untyped-defs, allow-incomplete-defs
"""The experts of gpt-oss with weights in MXFP4: `experts.py`'s grouped GEMMs, dequantized in them.

A matrix [N, K] has a 4-bit code (e2m1: sign, two exponent bits, one mantissa bit) per value, and a
scale, a power of two, per 32 values of a row (OCP Microscaling Formats, version 1.0).
`Mxfp4Matrices` keeps them so that a kernel needs no shuffles: byte j of 64 values has value j in
its lower bits and value 32 + j in its upper ones, so that either half of the bytes is 32
neighbouring columns with one scale. The scales of a row's 64 values are two bytes, and those of
neighbouring rows lie together. A code's low three bits, as exponent and mantissa of a float32,
are its value times 2^-126; the kept byte of a scale is the exponent of the float32 that makes up
for that, too. The values are exact in bfloat16, so only the order of sums differs from the kernels
for bfloat16 weights. Up to 128 tokens on Hopper have a kernel of their own
(`experts_mxfp4_sm90.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.kernels.moe.config import MAX_DECODE_TOKENS, choose_moe, choose_moe_mxfp4_sm90
from forerun.kernels.moe.experts import (
    ClampedSwiglu,
    clamped_swiglu,
    constants,
    expert_partials_ref,
    grid,
    pairs_of_tile,
    store_weighted,
)
from forerun.kernels.moe.experts_mxfp4_sm90 import expert_partials_mxfp4_sm90
from forerun.kernels.moe.routing import Routed
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK_K = 64  # values of a row in 32 bytes
RUN = 32  # values with one scale
SCALE_BIAS = 126  # kept scale - stored scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, eq=False)
class Mxfp4Weight(QuantizedWeight):
    """Codes and scales row by row, as they are loaded."""

    values: Tensor  # [..., N, K / 2] uint8: the code of an even column in the lower bits
    scales: Tensor  # [..., N, K / 32] uint8: exponents with bias 127

    rounds = False

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device) -> Mxfp4Weight:
        """Uninitialised, for matrices [..., N, K]."""
        *rows, k = shape
        new = partial(torch.empty, dtype=torch.uint8, device=device)
        return cls(new(*rows, k // 2), new(*rows, k // RUN))

    @classmethod
    def of(cls, blocks: Tensor, scales: Tensor) -> Mxfp4Weight:
        """Makes it from blocks [..., N, K / 32, 16] and scales, as checkpoints have them."""
        return cls(blocks.flatten(-2), scales)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-1], 2 * self.values.shape[-1]))

    def dequantize(self) -> Tensor:
        codes = torch.stack((self.values & 15, self.values >> 4), -1).flatten(-2)
        return _dequantize(codes.unflatten(-1, (-1, RUN)), self.scales.int() - 127)

    def scale_(self, factor: float) -> None:
        self.scales.add_(int(math.log2(factor)))


def _dequantize(codes: Tensor, exponents: Tensor) -> Tensor:
    """codes [..., R, 32] and exponents of two [..., R] -> [..., 32 R] float32."""
    table = torch.tensor((*_E2M1, *(-v for v in _E2M1)), device=codes.device)
    return torch.ldexp(table[codes.long()], exponents.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, eq=False)
class Mxfp4Matrices:
    """A matrix [N, K] per expert."""

    values: Tensor  # [E, N, K / 2] uint8
    scales: Tensor  # [E, K / 64, N, 2] uint8: the exponent of a float32

    @classmethod
    def pack(cls, weight: Mxfp4Weight) -> Mxfp4Matrices:
        """Packs [E, N, K], of which K is a multiple of 64.

        Raises:
            ConfigError: a scale larger than 2.
        """
        blocks, scales = weight.values.unflatten(-1, (-1, RUN // 2)), weight.scales
        if int(scales.max()) > 255 - SCALE_BIAS - 1:
            raise ConfigError("MXFP4 weights with scales larger than 2 are not supported.")
        codes = torch.stack((blocks & 15, blocks >> 4), -1)  # [E, N, R, 16, 2]
        halves = codes.flatten(-2).unflatten(-2, (-1, 2))  # [E, N, K / 64, 2, 32]
        values = halves[..., 0, :] | halves[..., 1, :] << 4
        by_block = (scales + SCALE_BIAS).unflatten(-1, (-1, 2)).transpose(1, 2)
        return cls(values.flatten(-2), by_block.contiguous())

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, n, half = self.values.shape
        return experts, n, 2 * half

    @property
    def bits(self) -> float:
        """Bits per value, with scales."""
        return 4 + 8 / RUN

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[E, N, K]."""
        blocks = self.values.unflatten(-1, (-1, RUN))  # [E, N, K / 64, 32]
        codes = torch.stack((blocks & 15, blocks >> 4), -2).flatten(-3, -2)  # [E, N, K / 32, 32]
        scales = self.scales.transpose(1, 2).flatten(-2)  # [E, N, K / 32]
        return _dequantize(codes, scales.int() - SCALE_BIAS - 127).to(dtype)


def expert_partials_mxfp4(
    x: Tensor, w13: Mxfp4Matrices, w2: Mxfp4Matrices, routed: Routed, swiglu: ClampedSwiglu
) -> Tensor:
    """`expert_partials` with weights in MXFP4: x [T, H] -> [k, T, H]."""
    if not use_triton(x):
        plain = w13.dequantize(x.dtype), w2.dequantize(x.dtype)
        return expert_partials_ref(x, *plain, routed, None, swiglu)
    tokens, (_, hidden, width), tiles = x.shape[0], w2.shape, routed.tiles
    assert tiles is not None and x.is_contiguous()
    assert hidden % BLOCK_K == 0 and width % BLOCK_K == 0
    sm90 = choose_moe_mxfp4_sm90(tokens, hidden, width, x.dtype, gpu_of(x.device))
    if sm90 is not None and tiles.progress is not None:
        return expert_partials_mxfp4_sm90(x, (w13, w2), routed, swiglu, sm90)
    config = choose_moe(tokens, gpu_of(x.device), x.itemsize)
    assert tiles.block_m == config.block_m
    top_k = routed.experts.shape[1]
    act = x.new_empty(tokens * top_k, width)
    gate_up_mxfp4[grid(tiles, width, config.gate_up)](
        x, w13.values, w13.scales, swiglu.b13, act, tiles.pairs, tiles.tiles,
        tiles.tiles.shape[1], hidden // BLOCK_K, width // BLOCK_K,
        TOP_K=top_k, ALPHA=swiglu.alpha, LIMIT=swiglu.limit,
        **constants(tiles, config.gate_up), **pdl_options(x),
    )  # fmt: skip
    out = routed.new_partials(x)
    down_mxfp4[grid(tiles, hidden, config.down)](
        act, w2.values, w2.scales, swiglu.b2, out, routed.weights, tiles.pairs, tiles.tiles,
        tiles.tiles.shape[1], tokens, hidden // BLOCK_K, width // BLOCK_K,
        TOP_K=top_k, **constants(tiles, config.down), **pdl_options(x),
    )  # fmt: skip
    return out


def describe_mxfp4(w2: Mxfp4Matrices, dtype: torch.dtype) -> str:
    """What computes with such weights, and activations of `dtype`."""
    (_, hidden, width), gpu = w2.shape, gpu_of(w2.values.device)
    sm90 = choose_moe_mxfp4_sm90(MAX_DECODE_TOKENS, hidden, width, dtype, gpu)
    few = "" if sm90 is None else f"up to {MAX_DECODE_TOKENS} tokens W4A16 in CUDA C++, more "
    return f"mxfp4 experts: {few}W4A16 in Triton"


@jit_no_specialize("max_tiles")
def gate_up_mxfp4(
    x,  # [T, H]
    values,  # [E, 2I, H / 2]
    scales,  # [E, H / 64, 2I, 2]
    b13,  # [E, 2I]
    act,  # [T * k, I]
    pairs,
    tiles,  # [3, max_tiles]
    max_tiles,
    h_blocks,  # H / 64
    i_blocks,  # I / 64
    TOP_K: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """`experts._gate_up`."""
    H, I = h_blocks * 64, i_blocks * 64  # noqa: E741
    tile, n_block = tl.program_id(0) % max_tiles, tl.program_id(0) // max_tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before the wait: `down_mxfp4` reads the tiles as soon as it starts.
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.load(tiles + 2 * max_tiles + tile)
    if rows > 0:
        expert = tl.load(tiles + tile).to(tl.int64)
        m_mask, pair = pairs_of_tile(pairs, tiles, max_tiles, tile, rows, BLOCK_M)
        n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, 32)
        x_tile = x + (pair // TOP_K).to(tl.int64)[:, None] * H + k[None, :]
        n_in = tl.minimum(n, I - 1)
        row = expert * 2 * I + n_in
        scale = scales + (expert * h_blocks * 2 * I + n_in) * 2
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(0, h_blocks):
            low = tl.load(x_tile + block * 64, mask=m_mask[:, None], other=0.0)
            high = tl.load(x_tile + block * 64 + 32, mask=m_mask[:, None], other=0.0)
            of_block = scale + block * 4 * I
            gate = _multiply(low, high, values, of_block, row, block, h_blocks, gate)
            up = _multiply(low, high, values, of_block + 2 * I, row + I, block, h_blocks, up)
        gate += tl.load(b13 + row).to(tl.float32)[None, :]
        up += tl.load(b13 + row + I).to(tl.float32)[None, :]
        # Rounded as the output of a GEMM is, before the activation.
        gate = gate.to(act.dtype.element_ty).to(tl.float32)
        up = up.to(act.dtype.element_ty).to(tl.float32)
        out = clamped_swiglu(gate, up, ALPHA, LIMIT)
        address = act + pair.to(tl.int64)[:, None] * I + n[None, :]
        mask = m_mask[:, None] & (n[None, :] < I)
        tl.store(address, out.to(act.dtype.element_ty), mask=mask)


@jit_no_specialize("max_tiles", "T")
def down_mxfp4(
    act,  # [T * k, I]
    values,  # [E, H, I / 2]
    scales,  # [E, I / 64, H, 2]
    b2,  # [E, H]
    out,  # [k, T, H]
    weights,  # [T, k] float32
    pairs,
    tiles,  # [3, max_tiles]
    max_tiles,
    T,
    h_blocks,  # H / 64
    i_blocks,  # I / 64
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """`experts._down`."""
    H, I = h_blocks * 64, i_blocks * 64  # noqa: E741
    tile, n_block = tl.program_id(0) % max_tiles, tl.program_id(0) // max_tiles
    # Before the wait: the kernel that made the tiles has finished, see `gate_up_mxfp4`.
    rows = tl.load(tiles + 2 * max_tiles + tile)
    expert = tl.load(tiles + tile, mask=rows > 0, other=0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if rows > 0:
        m_mask, pair = pairs_of_tile(pairs, tiles, max_tiles, tile, rows, BLOCK_M)
        n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, 32)
        act_tile = act + pair.to(tl.int64)[:, None] * I + k[None, :]
        n_in = tl.minimum(n, H - 1)
        row = expert * H + n_in
        scale = scales + (expert * i_blocks * H + n_in) * 2
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(0, i_blocks):
            low = tl.load(act_tile + block * 64, mask=m_mask[:, None], other=0.0)
            high = tl.load(act_tile + block * 64 + 32, mask=m_mask[:, None], other=0.0)
            acc = _multiply(low, high, values, scale + block * 2 * H, row, block, i_blocks, acc)
        acc += tl.load(b2 + row).to(tl.float32)[None, :]
        # Rounded as the output of a GEMM is, then weighted in float32.
        acc = acc.to(act.dtype.element_ty).to(tl.float32)
        mask = m_mask[:, None] & (n[None, :] < H)
        store_weighted(acc, out, weights, None, pair, n, m_mask, mask, T, H, TOP_K)


@jit
def _multiply(low, high, values, scale, row, block, num_blocks, acc):
    """acc [M, N] + 64 columns of x [M, 32] and [M, 32] times those of rows of W [N].

    `scale`: addresses [N] of both scales.
    """
    address = values + (row * num_blocks + block)[:, None] * 32 + tl.arange(0, 32)[None, :]
    packed = tl.load(address).to(tl.int32)
    low_w = _values(packed, tl.load(scale)).to(low.dtype)
    high_w = _values(packed >> 4, tl.load(scale + 1)).to(low.dtype)
    acc = tl.dot(low, tl.trans(low_w), acc, input_precision="ieee")
    return tl.dot(high, tl.trans(high_w), acc, input_precision="ieee")


@jit
def _values(code, scale):
    """Codes [N, 32] in the lowest four bits, and kept scales [N] -> float32."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return bits.to(tl.float32, bitcast=True) * factor[:, None]
