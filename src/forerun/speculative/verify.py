"""The accept rule: sample and match (lossless for any deterministic draft)."""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.commit import accept_torch


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
    return accept_torch(draft, drawn)
