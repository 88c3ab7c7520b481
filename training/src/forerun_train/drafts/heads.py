"""Heads in training: scores of all drafts of a block, with the labels before each of them known.

A greedy draft that is right up to draft k has seen what the labels show. So the drafts of this one
pass are right as far as those of serving are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun_train.objectives import Distances, Mix, PositionWeights, distances


@dataclass(frozen=True)
class Rows:
    """The rows of n blocks that predict, D of each."""

    hidden: Tensor  # [n, D, H]
    base: Tensor  # [n, D, V_d]: logits of the body alone
    before: Tensor  # [n, D] int64: the token before each draft, ids of the target
    labels: Tensor  # [n, D] int64: columns of the draft's vocabulary
    valid: Tensor  # [n, D] bool
    target: Tensor | None  # [n, D, V_d]: the target's logits
    embeds: Tensor | None  # [n, D, H]: the target's embedding of `before`
    skipped: Tensor | None = None  # [n, F, H]: hidden states of rows before those that predict


@dataclass(frozen=True)
class Schedule:
    """What changes while a draft is trained."""

    done: Tensor  # of the run, float32 from 0 to 1, on the device


class TrainingHead(nn.Module):
    """No head: each row's logits are those of the body."""

    reads_target = False  # its objective needs the target's distribution
    reads_embeddings = False
    default_mix = Mix()

    def forward(
        self, rows: Rows, mix: Mix, weights: PositionWeights, done: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Args:
            done: how much of the run is done, float32, for schedules.

        Returns:
            The sum of weighted losses, the sum of weights, and drafts [n, D], columns.
        """
        scores = self.scores(rows)
        found = distances(scores, rows.labels, rows.target, mix)
        w = weights.of(found.ce, rows.valid)
        loss = (found.loss * w).sum() + self.more_loss(rows, scores, found, w, done)
        return loss, w.sum(), self.choose(rows, scores.detach())

    def scores(self, rows: Rows) -> Tensor:
        """[n, D, V_d]."""
        return rows.base

    def more_loss(
        self, rows: Rows, scores: Tensor, found: Distances, weights: Tensor, done: Tensor
    ) -> Tensor:
        """What is added to the sum of losses of `scores`."""
        return scores.new_zeros((), dtype=torch.float32)

    def choose(self, rows: Rows, scores: Tensor) -> Tensor:
        """The greedy drafts [n, D], columns."""
        return scores.argmax(-1)
