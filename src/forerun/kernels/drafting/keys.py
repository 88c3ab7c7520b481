# mypy: allow-untyped-defs, allow-incomplete-defs
"""Keys of the tokens that a block's rows choose, one after the other.

Many CTAs score the columns of a row, each keeps its best, and the largest key wins by an atomic
maximum: the one with the largest score, or of equals with the lowest id. The next row's kernels
read the key, so that no kernel lies between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl
from forerun.kernels.runtime.pdl import pdl_options

NOTHING = (-0x7F800001 << 32) | 0x7FFFFFFF  # of token 0 with -inf: smaller than all others
BLOCK = 256


def new_keys(depth: int, batch: int, device: torch.device) -> Tensor:
    """Keys [D, B] int64 of rows that have chosen nothing yet."""
    return torch.full((depth, batch), NOTHING, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class TokensBefore:
    """Where kernels find the tokens that come before a row."""

    first: Tensor  # [B] int64: before row 0
    keys: Tensor  # [D, B] int64: what the rows have chosen
    row: int


def tokens_of_keys(keys: Tensor) -> Tensor:
    """The tokens [B, D] int64 of keys [D, B] on a GPU; 0 for a row of NaN and -inf only."""
    depth, batch = keys.shape
    out = torch.empty(batch, depth, dtype=torch.int64, device=keys.device)
    _tokens_of_keys[(-(-keys.numel() // BLOCK),)](
        keys, out, batch, depth, BLOCK=BLOCK, num_warps=4, **pdl_options(keys)
    )
    return out


@jit
def _tokens_of_keys(keys_ptr, out_ptr, batch, depth, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < batch * depth
    key = tl.load(keys_ptr + at % depth * batch + at // depth, mask=inside, other=0)
    tl.store(out_ptr + at, 0x7FFFFFFF - (key & 0x7FFFFFFF), mask=inside)


@jit
def raise_key(key_ptr, score, token, some):
    """Makes `token` the chosen one if its score, which is not NaN, is the best so far."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # these integers sort as the floats do
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    tl.atomic_max(key_ptr, key, mask=some, sem="relaxed")


@jit
def token_before(first_ptr, keys_ptr, row, batch, b, some):
    """The tokens int64 that rows `b` of a batch have before a row: what the one before has chosen,
    or `first` [B] int64.
    """
    if row == 0:
        token = tl.load(first_ptr + b, mask=some, other=0)
    else:
        key = tl.load(keys_ptr + (row - 1) * batch + b, mask=some, other=0x7FFFFFFF)
        token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    return token
