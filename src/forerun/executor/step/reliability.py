"""How often drafts are accepted at each confidence, counted on the device within the step.

A row per (mode, bin): greedy and sampled requests apart, since a head was trained for neither, and
`BINS` equal bins of confidence. Drafts after a rejected one were never tested and do not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.plan import CONFIDENCE_BINS, ConfidenceCounts
from forerun.speculative.ragged.estimator import FRACTION, Estimator


class ReliabilityTable:
    """Drafts, accepted ones, and the sum of their confidences, [2 * bins + 1, 3] float64. The last
    row takes what does not count.
    """

    def __init__(self, device: torch.device) -> None:
        rows = 2 * CONFIDENCE_BINS + 1
        self.counts = torch.zeros(rows, 3, dtype=torch.float64, device=device)
        self.used = False  # some draft came with confidences

    def add(
        self, confidence: Tensor, num_committed: Tensor, limits: Tensor, greedy: Tensor
    ) -> None:
        """Counts the drafts of a step; may be captured.

        Args:
            confidence: [B, D] float32.
            num_committed: [B] int32, accepted drafts and the bonus token.
            limits: [B] int32, drafts that may be accepted; 0 in the padding slot.
            greedy: [B] bool.
        """
        self.used = True
        draft = torch.arange(confidence.shape[1], device=confidence.device)
        accepted = draft < num_committed.unsqueeze(1) - 1
        tested = (draft < num_committed.unsqueeze(1)) & (draft < limits.unsqueeze(1))
        bins = (confidence * CONFIDENCE_BINS).long().clamp_(0, CONFIDENCE_BINS - 1)
        rows = bins + torch.where(greedy, 0, CONFIDENCE_BINS).unsqueeze(1)
        rows = torch.where(tested, rows, 2 * CONFIDENCE_BINS)
        values = torch.stack((torch.ones_like(confidence), accepted.float(), confidence), -1)
        self.counts.index_add_(0, rows.flatten(), values.flatten(0, 1).double())


def all_counts(table: ReliabilityTable, estimator: Estimator | None) -> Tensor:
    """[3 * bins, 3] float64: those of greedy and sampled requests, and of estimated rates."""
    estimated = table.counts.new_zeros(CONFIDENCE_BINS, 3)
    if estimator is not None:
        estimated = estimator.counts.double()
        estimated[:, 2] /= FRACTION
    return torch.cat((table.counts[:-1], estimated))


def confidence_counts(counts: Tensor) -> ConfidenceCounts:
    """A host copy of `all_counts` as plain numbers."""
    greedy, sampled, estimated = counts.view(3, CONFIDENCE_BINS, 3).tolist()
    return ConfidenceCounts(greedy=greedy, sampled=sampled, estimated=estimated)
