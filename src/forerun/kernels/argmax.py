# mypy: allow-untyped-defs, allow-incomplete-defs
"""Argmax over a vocabulary: of parts of every row, then of the parts. The lowest id of equals."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.device import gpu_of
from forerun.kernels.dispatch import jit, tl, triton, use_triton
from forerun.kernels.norm import vector_warps
from forerun.kernels.pdl import pdl_options

BLOCK = 2048  # columns a program reads at once


def argmax_torch(logits: Tensor) -> Tensor:
    """The twin of `argmax`: PyTorch's gives the lowest id as well."""
    return logits.argmax(-1)


def argmax(logits: Tensor) -> Tensor:
    """[R, V], any float dtype and row stride -> [R] int64. NaN never wins."""
    if not use_triton(logits):
        return argmax_torch(logits)
    rows, vocab = logits.shape
    parts, span = split_rows(logits)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    options = pdl_options(logits)
    _best_of_part[(rows, parts)](
        logits,
        best,
        ids,
        vocab,
        logits.stride(0),
        span,
        BLOCK=BLOCK,
        num_warps=vector_warps(BLOCK, logits),
        **options,
    )
    _best_part[(rows,)](
        best, ids, out, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1, **options
    )
    return out


def split_rows(logits: Tensor) -> tuple[int, int]:
    """(parts, columns a part): enough programs to fill the device four times over."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    parts = max(1, min(blocks, triton.cdiv(4 * gpu_of(logits.device).processors, rows)))
    span = triton.cdiv(blocks, parts) * BLOCK
    return triton.cdiv(vocab, span), span


@jit
def _best_of_part(
    logits, best_ptr, id_ptr, vocab, row_stride, span, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * row_stride
    at = part * span + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = at
    for first in tl.range(0, span, BLOCK, num_stages=4):
        column = at + first
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        ids = tl.where(x > best, column, ids)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    index = row.to(tl.int64) * tl.num_programs(1) + part
    tl.store(best_ptr + index, top)
    tl.store(id_ptr + index, tl.min(tl.where(best == top, ids, 0x7FFFFFFF), 0))


@jit
def _best_part(best_ptr, id_ptr, out, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * parts + i, mask=i < parts, other=float("-inf"))
    ids = tl.load(id_ptr + row * parts + i, mask=i < parts, other=0x7FFFFFFF)
    winner = tl.min(tl.where(best == tl.max(best, 0), ids, 0x7FFFFFFF), 0)
    tl.store(out + row, winner.to(tl.int64))
