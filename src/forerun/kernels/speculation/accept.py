# mypy: allow-untyped-defs, allow-incomplete-defs
"""The end of a step: how many drawn tokens are committed, and the slots advanced by them.

The accept rule is sample and match, lossless for any deterministic draft (`accept`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

_POINT = 32  # fraction bits of `SimulatedAcceptance.mean`
_NUDGE = 1 << 16  # whole products of a mean like 1.2 must not fall short of themselves


@dataclass(frozen=True)
class SimulatedAcceptance:
    """For benchmarks: how many tokens a step commits, whatever agrees.

    Step i of a slot commits floor((i + 1) · mean) - floor(i · mean), in fixed point, and never more
    than it has rows.
    """

    steps: Tensor  # [slots] int64: those that a slot has made; counted on
    mean: Tensor  # [1] int64: tokens a step, times 2^32

    @classmethod
    def of(cls, mean: float, slots: int, device: torch.device) -> SimulatedAcceptance:
        steps = torch.zeros(slots, dtype=torch.int64, device=device)
        pace = cls(steps, steps.new_zeros(1))
        pace.set(mean)
        return pace

    def set(self, mean: float) -> None:
        """From the next step on, captured or not."""
        self.mean.fill_(round(mean * 2**_POINT))

    def next(self, slots: Tensor) -> Tensor:
        """slots [B] int64 -> [B] int32, and their steps are counted. The twin of the kernel's."""
        steps = self.steps[slots]
        self.steps[slots] = steps + 1
        before = (steps * self.mean + _NUDGE) >> _POINT
        return (((steps + 1) * self.mean + _NUDGE >> _POINT) - before).int()


def accept(draft: Tensor, drawn: Tensor) -> Tensor:
    """How many tokens a step commits: the drafts that the target drew too, and one more.

    Row i of the verify pass draws y_i ~ p_i given that the drafts before it stand. While draft and
    draw agree the next row's condition holds; the first y that differs is itself a valid draw, and
    what comes after it was computed under a false condition. The output follows the target's
    distribution exactly, and with keyed noise it is the text of plain decoding.

    Args:
        draft: [B, K] int64, K >= 0.
        drawn: [B, K + 1] int64.

    Returns:
        [B] int32: 1 + the length of the longest prefix with draft[:, i] == drawn[:, i].
    """
    agree = (draft == drawn[:, :-1]).to(torch.int32)
    return agree.cumprod(-1, dtype=torch.int32).sum(-1, dtype=torch.int32) + 1


def accept_commit_ref(
    draft: Tensor,
    drawn: Tensor,
    slots: Tensor,
    start: Tensor,
    kv_len: Tensor,
    last_token: Tensor,
    history: Tensor,
    forced: Tensor | SimulatedAcceptance | None = None,
) -> Tensor:
    """The twin of `accept_commit`."""
    if isinstance(forced, SimulatedAcceptance):
        forced = forced.next(slots).clamp_max(drawn.shape[1])
    new = accept(draft, drawn) if forced is None else forced
    kv_len[slots] = start + new
    last_token[slots] = drawn.gather(1, (new - 1).long().unsqueeze(1)).squeeze(1)
    behind = torch.arange(1, drawn.shape[1] + 1, device=drawn.device)
    history[slots.unsqueeze(1), start.unsqueeze(1) + behind] = drawn.int()
    kv_len[-1:].zero_()
    return new


def accept_commit(
    draft: Tensor,
    drawn: Tensor,
    slots: Tensor,
    start: Tensor,
    kv_len: Tensor,
    last_token: Tensor,
    history: Tensor,
    forced: Tensor | SimulatedAcceptance | None = None,
) -> Tensor:
    """Decides what is committed and writes it to the slots' tables.

    The last row of the tables is the padding slot: its length stays 0.

    Args:
        draft: [B, K] int64, K >= 0.
        drawn: [B, W] int64, W = K + 1; drawn[:, i] stands at position start + i + 1.
        slots: [B] int64.
        start: [B] int32, the committed lengths before.
        kv_len: [slots] int32.
        last_token: [slots] int64.
        history: [slots, positions] int32.
        forced: to commit whatever agrees: [B] int32, or by the slots' own pace.

    Returns:
        new [B] int32, tokens committed.
    """
    if not use_triton(drawn):
        return accept_commit_ref(draft, drawn, slots, start, kv_len, last_token, history, forced)
    new = torch.empty_like(start)
    _accept_commit[(len(slots),)](
        draft,
        drawn,
        slots,
        start,
        forced.steps if isinstance(forced, SimulatedAcceptance) else forced,
        kv_len,
        last_token,
        history,
        new,
        draft.stride(0),
        drawn.stride(0),
        history.stride(0),
        kv_len.shape[0] - 1,
        forced.mean if isinstance(forced, SimulatedAcceptance) else None,
        PACE=isinstance(forced, SimulatedAcceptance),
        WIDTH=drawn.shape[1],
        BLOCK=triton.next_power_of_2(drawn.shape[1]),
        num_warps=1,
        **pdl_options(drawn),
    )
    return new


@jit
def _accept_commit(
    draft_ptr, drawn_ptr, slots, start_ptr, forced, kv_len, last_token, history, new_ptr,
    draft_row, drawn_row, history_row, padding_slot, mean_ptr,
    PACE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    drawn = tl.load(drawn_ptr + request * drawn_row + i, mask=i < WIDTH, other=-1)
    draft = tl.load(draft_ptr + request * draft_row + i, mask=i < WIDTH - 1, other=-2)
    # The first row that differs; behind the drafts all do.
    new = tl.min(tl.where(draft == drawn, BLOCK, i), 0) + 1
    slot, start = tl.load(slots + request), tl.load(start_ptr + request)
    if PACE:  # `SimulatedAcceptance.next`
        steps, mean = tl.load(forced + slot), tl.load(mean_ptr)
        after = (steps + 1) * mean + 65536 >> 32
        new = tl.minimum((after - (steps * mean + 65536 >> 32)).to(tl.int32), WIDTH)
        tl.store(forced + slot, steps + 1)
    elif forced is not None:
        new = tl.load(forced + request)
    tl.store(new_ptr + request, new)
    tl.store(kv_len + slot, tl.where(slot == padding_slot, 0, start + new))
    tl.store(last_token + slot, tl.sum(tl.where(i == new - 1, drawn, 0), 0))
    place = history + slot * history_row + start + 1 + i
    tl.store(place, drawn.to(tl.int32), mask=i < WIDTH)
