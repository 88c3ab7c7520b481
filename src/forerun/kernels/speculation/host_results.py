# mypy: allow-untyped-defs, allow-incomplete-defs
"""A step's tokens, written to the host's memory by the step itself.

A copy between two captured steps keeps the device waiting: it is another engine's work, which
begins after the graph and which the next graph waits for. A kernel of the graph writes to pinned
memory instead, which a device can address.
"""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 1024  # tokens that the kernel moves at once


def store_results_ref(sampled: Tensor, num_committed: Tensor, count: Tensor, ring: Tensor) -> None:
    """Reference implementation of `store_results`."""
    row = (count % ring.shape[0]).long()
    ring[row, : sampled.numel()] = sampled.flatten()
    ring[row, sampled.numel() :] = num_committed.to(ring.dtype)
    count += 1


def store_results(sampled: Tensor, num_committed: Tensor, count: Tensor, ring: Tensor) -> None:
    """Writes a step's tokens to row `count` mod R of a ring buffer, and counts the step.

    Args:
        sampled: [B, W] int64, contiguous.
        num_committed: [B] int32.
        count: [1] int64, steps so far.
        ring: [R, B * W + B] int64 in pinned memory: `sampled`, then `num_committed`. R is a power
            of two.
    """
    if not use_triton(sampled):
        store_results_ref(sampled, num_committed, count, ring)
        return
    batch, width = sampled.shape
    assert sampled.is_contiguous() and ring.shape[0] & (ring.shape[0] - 1) == 0
    _store_results[(1,)](
        sampled, num_committed, count, ring,
        BATCH=batch, TOKENS=batch * width, RING=ring.shape[0],
        BLOCK_B=triton.next_power_of_2(batch),
        BLOCK=min(BLOCK, triton.next_power_of_2(batch * width)),
        num_warps=1, **pdl_options(sampled),
    )  # fmt: skip


@jit
def _store_results(
    sampled, num_committed, count, ring,
    BATCH: tl.constexpr, TOKENS: tl.constexpr, RING: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA of one warp: all of it reads `count` before a thread of it writes it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    steps = tl.load(count)
    row = ring + (steps & (RING - 1)) * (TOKENS + BATCH)
    b = tl.arange(0, BLOCK_B)
    for first in range(0, TOKENS, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(row + i, tl.load(sampled + i, mask=i < TOKENS), mask=i < TOKENS)
    committed = tl.load(num_committed + b, mask=b < BATCH).to(tl.int64)
    tl.store(row + TOKENS + b, committed, mask=b < BATCH)
    tl.store(count, steps + 1)
