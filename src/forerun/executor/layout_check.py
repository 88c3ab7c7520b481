"""Whether a draft is served in the row layout it was trained in, seen over some of its first steps.

In the wrong one a draft gives the right text and hardly an accepted token, and no error. Before
some steps with drafts, the first request is drafted for once more, outside of the captured step, in
the layout that is served and in the other one. What the step then commits says which of the two
would have had more accepted. Counts stay on the device until the last of these steps. Drafting in
this way takes as long as some captured steps of a small model, so others lie between these steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from forerun.attention.base import HostBatch
from forerun.executor.graphs.steps import DecodeBatch, EagerSteps
from forerun.executor.step.device_step import DeviceStep
from forerun.sampling.sampler import GREEDY, SAMPLED, SamplingFlags

CHECKED_STEPS = 64
EVERY = 32  # steps with drafts from one that is checked to the next
SIGNIFICANT = 3.0  # standard deviations


@dataclass
class _Checked:
    """A request before its step."""

    slot: int
    start: Tensor  # [1] int32: its length
    drafts: Tensor  # [2, 1, D] int64


class RowLayoutCheck:
    """Counts the drafts that are right in each row layout."""

    def __init__(self, step: DeviceStep, kv_len_ub: int) -> None:
        """`kv_len_ub`: largest number of KV slots of a request, whatever its length is; other
        bounds would be other kernels, compiled while a request waits."""
        self._step, self._steps = step, EagerSteps(step)
        self._kv_len_ub = kv_len_ub
        self._left = CHECKED_STEPS
        self._seen = 0  # steps with drafts
        self._checked: _Checked | None = None
        # Right drafts of the served layout and of the other, and steps in which each had more.
        self._counts = torch.zeros(4, dtype=torch.int64, device=step.tables.device)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs what a check runs, on the padding slot, so that its kernels compile at start."""
        slot = self._step.tables.padding_slot
        with self._step.dummy_steps():
            for flags in (GREEDY, SAMPLED):
                self._steps.propose_row_layouts(self._batch(slot, flags, HostBatch.padding(1)))

    def is_due(self) -> bool:
        """Counts a step with drafts, the one that comes next; whether it is checked."""
        number, self._seen = self._seen, self._seen + 1
        return self._left > 0 and number % EVERY == 0

    def before(self, slot: int, flags: SamplingFlags, lengths: HostBatch) -> None:
        """Drafts for a request of the step that comes next, in both row layouts.

        Args:
            flags: of the request.
            lengths: of the request alone.
        """
        batch = self._batch(slot, flags, lengths)
        start = self._step.tables.kv_len[slot : slot + 1].clone()
        drafts = self._steps.propose_row_layouts(batch)
        if drafts is None:  # the algorithm has failed
            self._left = 0
            return
        self._left -= 1
        self._checked = _Checked(slot, start, drafts)

    def after(self) -> Tensor | None:
        """Counts what the step has shown. Returns the counts after the last step, else None."""
        checked, self._checked = self._checked, None
        if checked is None:
            return None
        tables, drafts = self._step.tables, checked.drafts[:, 0]
        offsets = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
        committed = offsets <= tables.kv_len[checked.slot] - checked.start
        positions = (checked.start + offsets).clamp_max(tables.history.shape[1] - 1)
        right = (drafts == tables.history[checked.slot][positions]) & committed
        own, other = right.cumprod(1).sum(1).unbind()
        self._counts += torch.stack([own, other, own > other, other > own])
        return None if self._left else self._counts

    def _batch(self, slot: int, flags: SamplingFlags, lengths: HostBatch) -> DecodeBatch:
        """A step of full width, whatever that of the batch is: its kernels are compiled."""
        width = self._step.caps.num_verify_tokens
        return DecodeBatch([slot], width, self._kv_len_ub, flags, lengths)


def warning(counts: Tensor, other_row_layout: str) -> str | None:
    """What to tell the user of the counts of `RowLayoutCheck.after`, on the host; None: nothing.

    The other layout is clearly better if it would have had more drafts accepted in more of the
    steps that tell the two apart than chance explains (a sign test).
    """
    own, other, own_wins, other_wins = counts.tolist()
    if other_wins == 0 or other_wins - own_wins < SIGNIFICANT * sqrt(own_wins + other_wins):
        return None
    return (
        f"The draft seems to be misread: in {CHECKED_STEPS} steps {own} of its drafts were right,"
        f" and at least {other} would have been with {other_row_layout}. Set that."
    )
