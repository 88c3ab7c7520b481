# mypy: allow-untyped-defs, allow-incomplete-defs
"""Domino's recurrence: a GRU over the tokens of a block, and what its states add to the rows.

Each is one kernel, since a row waits for the one before and has little to compute: CTAs take a few
units of the state each, with all gates of them, and the kernel looks its input up by the token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.drafting.keys import TokensBefore, token_before
from forerun.kernels.runtime.gpu import gpu_of, next_power_of_2
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

UNITS = 8  # of the state that a CTA computes
OUTPUTS = 16  # of `silu_of_state` that a CTA computes
MAX_BLOCK_B = 32  # requests of a CTA
BLOCK_BYTES = 512  # of a weight's row that are multiplied at once


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
    block_b = min(MAX_BLOCK_B, max(16, next_power_of_2(batch)))
    out = x.new_empty(batch, size)
    first, keys, row = (x, x, 0) if tokens is None else (tokens.first, tokens.keys, tokens.row)
    _gru_step[(-(-size // UNITS), -(-batch // block_b))](
        x, first, keys, out if state is None else state, of_input, of_state, out,
        batch, row, inputs, size, LOOK_UP=tokens is not None, ZEROS=state is None, UNITS=UNITS,
        BLOCK_B=block_b, **_options(x),
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
    outputs = len(weight)
    block_b = min(MAX_BLOCK_B, max(16, next_power_of_2(batch)))
    out = state.new_empty(batch, outputs)
    _silu_of_state[(-(-outputs // OUTPUTS), -(-batch // block_b))](
        base, state, weight, out, batch, outputs, size, base.stride(0), weight.stride(0),
        OUTPUTS=OUTPUTS, BLOCK_B=block_b, **_options(state),
    )  # fmt: skip
    return out


def _options(like: Tensor) -> dict[str, Any]:
    """Tiles, pipelines and warps."""
    block, shape = BLOCK_BYTES // like.itemsize, {"num_warps": 4, "num_stages": 4}
    if gpu_of(like.device).amd:
        block, shape = block // 2, {"num_warps": 8, "num_stages": 2}
    return {"BLOCK_K": block} | shape | pdl_options(like)


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
    for first in range(0, inputs, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < inputs
        weight = weights[:, None] + k[None, :]
        weight = tl.load(weight, mask=some[:, None] & inside[None, :], other=0.0)
        x = tl.load(xs[None, :] + k[:, None], mask=inside[:, None] & served[None, :], other=0.0)
        sums = tl.dot(weight, x, sums, input_precision="ieee")
    return sums
