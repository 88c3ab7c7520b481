# mypy: allow-untyped-defs, allow-incomplete-defs
"""The elementwise half of a GRU cell."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl, use_triton

BLOCK = 256


def gru_gates_ref(of_input: Tensor, of_state: Tensor, state: Tensor) -> Tensor:
    """Reference implementation of `gru_gates`."""
    r_x, z_x, n_x = of_input.chunk(3, 1)
    r_h, z_h, n_h = of_state.chunk(3, 1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    return (1 - z) * (n_x + r * n_h).tanh() + z * state


def gru_gates(of_input: Tensor, of_state: Tensor, state: Tensor) -> Tensor:
    """The next state [B, g] of a GRU without biases, gates in PyTorch's order: r, z, n.

    Args:
        of_input: W_ih x, [B, 3 g].
        of_state: W_hh state, [B, 3 g].
        state: [B, g].
    """
    if not use_triton(state):
        return gru_gates_ref(of_input, of_state, state)
    batch, size = state.shape
    out = torch.empty_like(state)
    _gru_gates[(batch, -(-size // BLOCK))](
        of_input.contiguous(), of_state.contiguous(), state, out, size, BLOCK=BLOCK, num_warps=4
    )
    return out


@jit
def _gru_gates(x_ptr, h_ptr, state_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x_ptr += row * 3 * size + at
    h_ptr += row * 3 * size + at
    r = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    r += tl.load(h_ptr, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(x_ptr + size, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(h_ptr + size, mask=inside, other=0.0).to(tl.float32)
    n = tl.load(x_ptr + 2 * size, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + 2 * size, mask=inside, other=0.0).to(tl.float32)
    state = tl.load(state_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.sigmoid(z)
    n = 2.0 * tl.sigmoid(2.0 * (n + tl.sigmoid(r) * h)) - 1.0  # tanh
    out = (1.0 - z) * n + z * state
    tl.store(out_ptr + row * size + at, out.to(out_ptr.dtype.element_ty), mask=inside)
