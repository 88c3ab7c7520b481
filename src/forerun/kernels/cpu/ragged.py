"""Ragged verify passes on a CPU; arguments as of those in `speculative/ragged` and
`kernels/speculation/ragged.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.cpu.step import run_with


def survival(
    estimator: tuple[Tensor, ...], slots: Tensor, limits: Tensor, confidence: Tensor | None
) -> Tensor:
    """[B, K]; `estimator`: the rule, and the tensors of `Estimator` in order."""
    shape = slots.shape[0], estimator[1].shape[1]
    out = torch.empty(shape, dtype=torch.float32)
    stride = 0 if confidence is None else confidence.stride(0)
    sizes = *shape, estimator[1].shape[0], stride
    run_with("forerun_survival", (*estimator, slots, limits, confidence, out), *sizes)
    return out


def learn(
    estimator: tuple[Tensor, ...],
    step: tuple[Tensor | None, ...],
    confidence: Tensor | None,
    width: int,
    num_drafting: int,
) -> None:
    """`step`: slots, widths, committed tokens, limits; `estimator` as of `survival`."""
    slots = step[0]
    assert slots is not None
    stride = 0 if confidence is None else confidence.stride(0)
    rows, drafts = estimator[1].shape
    sizes = slots.shape[0], drafts, rows, stride, width, num_drafting
    run_with("forerun_learn", (*estimator, *step, confidence), *sizes)


def count_reliability(
    counts: Tensor, step: tuple[Tensor | None, ...], depth: int, stride: int, padding_slot: int
) -> None:
    """`step`: confidences, committed tokens, slots; limits and temperatures by slot; widths."""
    slots = step[2]
    assert slots is not None
    sizes = slots.shape[0], depth, counts.shape[0] // 2, stride, padding_slot
    run_with("forerun_count_reliability", (counts, *step), *sizes)


def allocate(survival: Tensor, wanted: int) -> Tensor:
    """[B] int32; `wanted`: drafts of all requests, at most B * K."""
    batch, num_drafts = survival.shape
    widths = torch.empty(batch, dtype=torch.int32)
    sizes = batch, num_drafts, survival.stride(0), wanted
    run_with("forerun_allocate", (survival, widths), *sizes)
    return widths


def pack_tokens(
    widths: Tensor, num_rows: int, given: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The fields of `RaggedRows` after the widths, and what is packed.

    `given`: ids [B, W], candidates, positions, kv_slots.
    """
    batch, width = given[0].shape
    first = widths.new_empty(batch + 1)
    places, ids, kv_slots = (given[0].new_empty(num_rows) for _ in range(3))
    rows = given[0].new_empty(batch * width)
    positions = widths.new_empty(num_rows)
    layout, packed = (first, places, rows), (ids, positions, kv_slots)
    sizes = batch, width, num_rows
    run_with("forerun_pack_tokens", (widths, *given, *layout, *packed), *sizes)
    return layout, packed
