"""How often drafts are accepted at each confidence, counted on the device within the step.

A row per (mode, bin): greedy and sampled requests apart, since a head was trained for neither, and
`BINS` equal bins of confidence. Drafts after a rejected one were never tested and do not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.plan import CONFIDENCE_BINS, ConfidenceCounts
from forerun.executor.step.slot_tables import SlotTables
from forerun.kernels.speculation.reliability import DraftsBySlot, count_reliability
from forerun.speculative.ragged.estimator import FRACTION


class ReliabilityTable:
    """Drafts, accepted ones, and the sum of their confidences, [2 * bins, 3] float64."""

    def __init__(self, tables: SlotTables) -> None:
        rows = 2 * CONFIDENCE_BINS
        self.counts = torch.zeros(rows, 3, dtype=torch.float64, device=tables.device)
        self.used = False  # some draft came with confidences
        temperature = tables.sampling.temperature
        self._drafts = DraftsBySlot(tables.max_drafts, temperature, tables.padding_slot)

    def add(
        self, confidence: Tensor, num_committed: Tensor, slots: Tensor, widths: Tensor | None
    ) -> None:
        """Counts the drafts of a step; may be captured.

        Args:
            confidence: [B, D] float32.
            num_committed: [B] int32, accepted drafts and the bonus token.
            slots: [B] int64.
            widths: [B] int32, tokens that were verified; None: all drafts and one.
        """
        self.used = True
        confidence = confidence.contiguous()
        count_reliability(self.counts, confidence, num_committed, slots, self._drafts, widths)


def confidence_counts(counts: Tensor, estimated: Tensor | None) -> ConfidenceCounts:
    """Host copies of `ReliabilityTable.counts` and `Estimator.counts` as plain numbers."""
    greedy, sampled = counts.view(2, CONFIDENCE_BINS, 3).tolist()
    rates = [[0, 0, 0]] * CONFIDENCE_BINS if estimated is None else estimated.tolist()
    rated = [[float(n), float(hits), total / FRACTION] for n, hits, total in rates]
    return ConfidenceCounts(greedy=greedy, sampled=sampled, estimated=rated)
