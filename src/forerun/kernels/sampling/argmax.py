# mypy: allow-untyped-defs, allow-incomplete-defs
"""Argmax over a vocabulary: of parts of every row, then of the parts. The lowest id of equals."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.elementwise.rms_norm import vector_warps
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

SHORT, LONG = 1024, 8192  # columns a program of argmax reads: few rows, and many


def argmax_ref(logits: Tensor) -> Tensor:
    """The twin of `argmax`: PyTorch's gives the lowest id as well."""
    return logits.argmax(-1)


def argmax(logits: Tensor) -> Tensor:
    """[R, V], any float dtype and row stride -> [R] int64. NaN never wins."""
    if not use_triton(logits):
        return argmax_ref(logits)
    rows, vocab = logits.shape
    # Two programs a processor at least; beyond that, longer ones have more loads in flight.
    block = triton.next_power_of_2(rows * vocab // (2 * gpu_of(logits.device).num_sms) + 1)
    block = min(max(block // 2, SHORT), LONG)
    parts = triton.cdiv(vocab, block)
    keys = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    options = pdl_options(logits)
    _best_of_part[(parts, rows)](
        logits, keys, vocab, logits.stride(0), parts,
        BLOCK=block, num_warps=max(1, vector_warps(block, logits) // 4), **options,
    )  # fmt: skip
    padded = triton.next_power_of_2(parts)
    _best_part[(rows,)](
        keys, out, parts, BLOCK=padded, num_warps=1 if padded <= 128 else 4, **options
    )
    return out


@jit
def _best_of_part(logits, keys, vocab, row_stride, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program: BLOCK columns of a row, into one key."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf"))
    top = tl.max(x.to(tl.float32), 0)
    # Where all are NaN none is equal: then any id of this part.
    place = tl.min(tl.where(x.to(tl.float32) == top, at, part * BLOCK + BLOCK), 0)
    place = tl.minimum(place, vocab - 1)
    top = tl.where(top == top, top, float("-inf"))
    bits = tl.where(top == 0, 0.0, top).to(tl.int32, bitcast=True)  # -0 equals 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats order like these integers
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
    tl.store(keys + row * parts + part, key)


@jit
def _best_part(keys, out, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The largest key: of equal logits the lowest id."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    key = tl.load(keys + row * parts + i, mask=i < parts, other=-0x7FFFFFFFFFFFFFFF)
    tl.store(out + row, 0x7FFFFFFF - (tl.max(key, 0) & 0x7FFFFFFF))
