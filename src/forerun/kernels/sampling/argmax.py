# mypy: allow-untyped-defs, allow-incomplete-defs
"""Argmax over a vocabulary, in two kernels: of each part of a row, then over the parts.

Ties go to the lowest id. A row with a NaN or +inf, or of -inf alone, yields INVALID_TOKEN: the
host sees it with the step's result and ends the request, at no cost to the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.tokens import INVALID_TOKEN
from forerun.kernels.runtime.gpu import gpu_of, vector_warps
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.sampling.sort_keys import sort_keys

MIN_BLOCK, MAX_BLOCK = 1024, 8192  # logits that a CTA reads: with few rows, and with many


def argmax_ref(logits: Tensor, invalid: int = INVALID_TOKEN) -> Tensor:
    """Reference implementation of `argmax`. torch.argmax finds a NaN first, and the lowest id."""
    ids = logits.argmax(-1)
    largest = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return torch.where(largest.isfinite(), ids, invalid)


def argmax_keys_ref(logits: Tensor, first_id: int) -> Tensor:
    """Reference implementation of `argmax_keys`."""
    values, ids = logits.float().max(-1)  # the first of equals; a NaN before all else
    values = torch.where(values.isnan(), torch.inf, values)
    return sort_keys(values, 0x7FFFFFFF - first_id - ids)


def ids_of_keys(keys: Tensor, invalid: int = INVALID_TOKEN) -> Tensor:
    """The token ids [R] int64 of keys; `invalid` as in `argmax`."""
    order = keys >> 32
    finite = (order > -0x7F800001) & (order < 0x7F800000)  # between the keys of -inf and +inf
    return torch.where(finite, 0x7FFFFFFF - (keys & 0x7FFFFFFF), invalid)


def argmax_keys(logits: Tensor, first_id: int) -> Tensor:
    """Makes keys of a vocabulary in parts: the larger has the larger logit, or the lower id.

    logits [R, V] of ids `first_id` to `first_id` + V -> [R] int64. A part with a NaN or +inf has
    the largest key of all, whatever the others are.
    """
    if not use_triton(logits):
        return argmax_keys_ref(logits, first_id)
    keys = _part_keys(logits)
    out = torch.empty(len(keys), dtype=torch.int64, device=logits.device)
    _reduce(keys, out, INVALID_TOKEN, first_id)
    return out


def argmax(logits: Tensor, invalid: int = INVALID_TOKEN) -> Tensor:
    """The id of the largest logit in each row.

    Args:
        logits: [R, V], any float dtype and row stride.
        invalid: the result for rows that have a NaN or +inf, or are all -inf.

    Returns:
        [R] int64.
    """
    if not use_triton(logits):
        return argmax_ref(logits, invalid)
    keys = _part_keys(logits)
    out = torch.empty(len(keys), dtype=torch.int64, device=logits.device)
    _reduce(keys, out, invalid)
    return out


def _part_keys(logits: Tensor) -> Tensor:
    """[R, parts] int64: the largest key of each part of a row."""
    rows, vocab = logits.shape
    # At least two CTAs per SM; beyond that, larger blocks have more loads in flight.
    block = triton.next_power_of_2(rows * vocab // (2 * gpu_of(logits.device).num_sms) + 1)
    block = min(max(block // 2, MIN_BLOCK), MAX_BLOCK)
    num_parts = triton.cdiv(vocab, block)
    keys = torch.empty(rows, num_parts, dtype=torch.int64, device=logits.device)
    _argmax_part[(rows * num_parts,)](  # in one dimension: y has at most 65,535
        logits, keys, vocab, logits.stride(0), num_parts,
        BLOCK=block, num_warps=max(1, vector_warps(block, logits) // 4), **pdl_options(logits),
    )  # fmt: skip
    return keys


def _reduce(keys: Tensor, out: Tensor, invalid: int, first_id: int | None = None) -> None:
    """The ids of the largest keys [R, parts]; with `first_id`, the id of column 0, keys."""
    num_parts = keys.shape[1]
    padded = triton.next_power_of_2(num_parts)
    _argmax_reduce[(len(keys),)](
        keys, out, num_parts, 0 if first_id is None else first_id,
        INVALID=invalid, KEYS=first_id is not None, BLOCK=padded,
        num_warps=1 if padded <= 128 else 4, **pdl_options(out),
    )  # fmt: skip


@jit
def _argmax_part(
    logits, keys, vocab, row_stride, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One CTA per BLOCK logits of a row, reduced to one sortable key (value, -id)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = (tl.program_id(0) // num_parts).to(tl.int64), tl.program_id(0) % num_parts
    id = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + id, mask=id < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    has_nan = tl.max((x != x).to(tl.int32), 0) > 0
    largest = tl.where(has_nan, float("inf"), tl.max(x, 0))  # NaN is as invalid as +inf
    first = tl.min(tl.where(x == largest, id, part * BLOCK + BLOCK), 0)
    bits = tl.where(largest == 0, 0.0, largest).to(tl.int32, bitcast=True)  # -0 equals 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # these integers sort as the floats do
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)
    tl.store(keys + row * num_parts + part, key)


@jit_no_specialize("first_id")
def _argmax_reduce(
    keys, out, num_parts, first_id,
    INVALID: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per row: the largest key, so that of equal logits the lowest id wins. KEYS: out is
    that key, for an id that counts from `first_id`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    key = tl.load(keys + row * num_parts + i, mask=i < num_parts, other=-0x7FFFFFFFFFFFFFFF)
    key = tl.max(key, 0)
    if KEYS:
        tl.store(out + row, key - first_id)
    else:
        order = key >> 32
        finite = (order > -0x7F800001) & (order < 0x7F800000)  # between the keys of -inf and +inf
        tl.store(out + row, tl.where(finite, 0x7FFFFFFF - (key & 0x7FFFFFFF), INVALID))
