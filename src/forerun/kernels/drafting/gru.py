# mypy: allow-untyped-defs, allow-incomplete-defs
"""Domino's recurrence: a GRU over the tokens of a block, and what its states add to the rows.

Each is one kernel, since a row waits for the one before and has little to compute: CTAs take a few
units of the state each, with all gates of them, and the kernel looks its input up by the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.drafting.keys import TokensBefore, token_before
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of, next_power_of_2
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

MAX_BLOCK_B = 32  # requests of a CTA
GATES = 4  # sums of a unit: n has one of its input and one of the state


def gru_step_ref(x: Tensor, state: Tensor | None, of_input: Tensor, of_state: Tensor) -> Tensor:
    """Reference implementation of `gru_step`, without tokens."""
    if state is None:
        state = x.new_zeros(len(x), of_state.shape[1])
    r_x, z_x, n_x = F.linear(x, of_input).chunk(3, 1)
    r_h, z_h, n_h = F.linear(state, of_state).chunk(3, 1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    return (1 - z) * (n_x + r * n_h).tanh() + z * state


def gru_step(
    x: Tensor,
    state: Tensor | None,
    of_input: Tensor,
    of_state: Tensor,
    tokens: TokensBefore | None = None,
) -> Tensor:
    """The next state [B, g] of a GRU without biases, gates in PyTorch's order: r, z, n.

    Args:
        x: [B, in], contiguous; with `tokens`, [V, in], of which a request's token is its row.
        state: [B, g], contiguous; none: zeros.
        of_input: [3 g, in], contiguous.
        of_state: [3 g, g], contiguous.
        tokens: only on a GPU.
    """
    if not use_triton(x):
        assert tokens is None
        return gru_step_ref(x, state, of_input, of_state)
    batch = len(x if tokens is None else tokens.first)
    size, inputs = of_state.shape[1], x.shape[1]
    tile = tile_of(batch, gpu_of(x.device))
    units = tile.rows // GATES
    out = x.new_empty(batch, size)
    first, keys, row = (x, x, 0) if tokens is None else (tokens.first, tokens.keys, tokens.row)
    _gru_step[(-(-size // units), -(-batch // tile.requests))](
        x, first, keys, out if state is None else state, of_input, of_state, out,
        batch, row, inputs, size, LOOK_UP=tokens is not None, ZEROS=state is None, UNITS=units,
        **tile.options(x),
    )  # fmt: skip
    return out


def silu_of_state_ref(base: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    """Reference implementation of `silu_of_state`."""
    return F.silu(torch.addmm(base, state, weight.t()))


def silu_of_state(base: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    """SiLU of base + weight state, [B, m].

    Args:
        base: [B, m], contiguous rows.
        state: [B, g], contiguous.
        weight: [m, g], contiguous rows.
    """
    if not use_triton(base):
        return silu_of_state_ref(base, state, weight)
    batch, size = state.shape
    outputs, tile = len(weight), tile_of(batch, gpu_of(state.device))
    of_cta = tile.rows // 2  # for more CTAs: a readout has few outputs
    out = state.new_empty(batch, outputs)
    _silu_of_state[(-(-outputs // of_cta), -(-batch // tile.requests))](
        base, state, weight, out, batch, outputs, size, base.stride(0), weight.stride(0),
        OUTPUTS=of_cta, **tile.options(state),
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Tile:
    """What a CTA multiplies at once, and how."""

    rows: int  # of weights
    requests: int
    block_bytes: int  # of a weight's row
    num_warps: int
    num_stages: int

    def options(self, like: Tensor) -> dict[str, Any]:
        """Keywords of a launch."""
        block = {"BLOCK_B": self.requests, "BLOCK_K": self.block_bytes // like.itemsize}
        how = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return block | how | pdl_options(like)


def tile_of(batch: int, gpu: GpuInfo) -> Tile:
    """One request has no matrix operations, and CTAs of few rows; more share rows of weights."""
    if batch == 1:
        return Tile(8, 1, 2048, num_warps=4, num_stages=2)
    rows, requests = 32, min(MAX_BLOCK_B, max(16 if gpu.amd else 8, next_power_of_2(batch)))
    if gpu.amd:
        return Tile(rows, requests, 256, num_warps=4, num_stages=2)
    block = 1024
    stages = 1 + gpu.smem_bytes // ((rows + requests) * block)
    return Tile(rows, requests, block, num_warps=4, num_stages=min(4, stages))


@jit_no_specialize("row")
def _gru_step(
    x_ptr, first_ptr, keys_ptr, state_ptr, of_input_ptr, of_state_ptr, out_ptr,
    batch, row, inputs, size,
    LOOK_UP: tl.constexpr, ZEROS: tl.constexpr, UNITS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Four sums a unit: of gates r and z, and of n's input and n's state."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m, b = tl.arange(0, 4 * UNITS), tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    part, served = m // UNITS, b < batch
    unit = tl.program_id(0) * UNITS + m % UNITS
    index = b.to(tl.int64)
    if LOOK_UP:
        index = token_before(first_ptr, keys_ptr, row, batch, b, served)
    sums = tl.zeros([4 * UNITS, BLOCK_B], tl.float32)
    weights = of_input_ptr + (part * size + unit).to(tl.int64) * inputs
    some = (unit < size) & (part < 3)
    sums = _add_product(sums, weights, some, x_ptr + index * inputs, served, inputs, BLOCK_K)
    if not ZEROS:
        gate = tl.where(part == 3, 2, part)
        weights = of_state_ptr + (gate * size + unit).to(tl.int64) * size
        some = (unit < size) & (part != 2)
        states = state_ptr + b.to(tl.int64) * size
        sums = _add_product(sums, weights, some, states, served, size, BLOCK_K)
    parts = tl.reshape(sums, [4, UNITS, BLOCK_B])
    which = tl.arange(0, 4)[:, None, None]
    r = tl.sigmoid(tl.sum(tl.where(which == 0, parts, 0.0), 0))
    z = tl.sigmoid(tl.sum(tl.where(which == 1, parts, 0.0), 0))
    of_input = tl.sum(tl.where(which == 2, parts, 0.0), 0)
    of_state = tl.sum(tl.where(which == 3, parts, 0.0), 0)
    n = 2.0 * tl.sigmoid(2.0 * (of_input + r * of_state)) - 1.0  # tanh
    own = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    at = b.to(tl.int64)[None, :] * size + own[:, None]
    both = (own < size)[:, None] & served[None, :]
    out = (1.0 - z) * n
    if not ZEROS:
        out += z * tl.load(state_ptr + at, mask=both, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=both)


@jit
def _silu_of_state(
    base_ptr, state_ptr, weight_ptr, out_ptr, batch, outputs, size, base_stride, weight_stride,
    OUTPUTS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    some, served = m < outputs, b < batch
    both = some[:, None] & served[None, :]
    sums = tl.load(base_ptr + b[None, :] * base_stride + m[:, None], mask=both, other=0.0)
    weights = weight_ptr + m.to(tl.int64) * weight_stride
    states = state_ptr + b * size
    sums = _add_product(sums.to(tl.float32), weights, some, states, served, size, BLOCK_K)
    out = (sums * tl.sigmoid(sums)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b[None, :] * outputs + m[:, None], out, mask=both)


@jit
def _add_product(sums, weights, some, xs, served, inputs, BLOCK_K: tl.constexpr):
    """sums [M, B] + the product of M rows at `weights` and B at `xs`, of `inputs` values each."""
    M: tl.constexpr = sums.shape[0]
    B: tl.constexpr = sums.shape[1]
    # Parts have sums of their own, so that additions wait for few others.
    PARTS: tl.constexpr = 4
    if B == 1:
        parts = tl.zeros([M, BLOCK_K], tl.float32)
        for first in range(0, inputs, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            inside = k < inputs
            weight = weights[:, None] + k[None, :]
            weight = tl.load(weight, mask=some[:, None] & inside[None, :], other=0.0)
            x = tl.load(xs[:, None] + k[None, :], mask=inside[None, :], other=0.0)
            parts += weight.to(tl.float32) * x.to(tl.float32)
        sums += tl.sum(parts, 1)[:, None]
    else:
        parts = tl.zeros([PARTS, M, B], tl.float32)
        part = tl.arange(0, PARTS) * (BLOCK_K // PARTS)
        own = part[:, None] + tl.arange(0, BLOCK_K // PARTS)[None, :]
        for first in range(0, inputs, BLOCK_K):
            k = first + own
            inside = k < inputs
            weight = weights[None, :, None] + k[:, None, :]
            both = some[None, :, None] & inside[:, None, :]
            weight = tl.load(weight, mask=both, other=0.0)
            both = inside[:, :, None] & served[None, None, :]
            x = tl.load(xs[None, None, :] + k[:, :, None], mask=both, other=0.0)
            parts = tl.dot(weight, x, parts, input_precision="ieee")
        sums += tl.sum(parts, 0)
    return sums
