# mypy: allow-untyped-defs, allow-incomplete-defs
"""The logarithm of a row's sum of exponentials, with one order of sums for any number of rows.

`torch.logsumexp` divides a row among as many threads as there are to spare, so the last bits of a
log-probability would change with the batch. Here parts have a fixed size, and so have the steps in
which their sums are added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.cpu import functions as cpu
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pairs import sum_pairs
from forerun.kernels.runtime.pdl import pdl_options

PART = 4096  # logits that a CTA reads


def log_sum_exp_ref(logits: Tensor) -> Tensor:
    """Reference implementation of `log_sum_exp`."""
    return logits.float().logsumexp(-1)


def log_sum_exp(logits: Tensor) -> Tensor:
    """log Σ exp(x) of each row.

    Args:
        logits: [R, V], any float dtype and row stride; -inf weighs nothing.

    Returns:
        [R] float32; -inf for rows of -inf alone, NaN for rows with a NaN or +inf.
    """
    if not use_triton(logits):
        return cpu.log_sum_exp(logits) if cpu.serve(logits) else log_sum_exp_ref(logits)
    rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, PART)
    parts = torch.empty(rows, num_parts, 2, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    options = pdl_options(logits)
    _sum_part[(num_parts, rows)](
        logits, parts, vocab, logits.stride(0), num_parts, PART=PART, **options
    )
    _sum_parts[(rows,)](
        parts, out, num_parts, BLOCK=triton.next_power_of_2(num_parts), num_warps=1, **options
    )
    return out


@jit
def _sum_part(logits, parts, vocab, row_stride, num_parts, PART: tl.constexpr, PDL: tl.constexpr):
    """One CTA per part of a row: its maximum, and the sum relative to it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    id = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * row_stride + id, mask=id < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    largest = tl.max(x, 0)
    weights = tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(sum_pairs(weights, 1, 1, PART))
    at = parts + (row * num_parts + part) * 2
    tl.store(at, largest)
    tl.store(at + 1, total)


@jit
def _sum_parts(parts, out, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One CTA per row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at = parts + (row * num_parts + i) * 2
    largest = tl.load(at, mask=i < num_parts, other=float("-inf"))
    total = tl.load(at + 1, mask=i < num_parts, other=0.0)
    top = tl.max(largest, 0)
    weights = total * tl.exp(largest - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(sum_pairs(weights, 1, 1, BLOCK))
    tl.store(out + row, top + tl.log(total))
