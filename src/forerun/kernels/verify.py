"""The rows that the target verifies, from drafts of any origin."""

from __future__ import annotations

import torch
from torch import Tensor


def verify_ids(
    last: Tensor, draft: Tensor, limit: Tensor, depth: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """What the target runs on, and what its draws are compared with.

    Args:
        last: [B] int64, the newest token.
        draft: [B, W - 1] int64.
        limit: [B] int32: drafts of greater depth are not accepted.
        depth: [B or 1, W - 1] int32, of every draft; in a chain 1 … W - 1.
        vocab: ids outside run as a token inside, and are never accepted.

    Returns:
        ids [B, W] int64; judged [B, W - 1] int64, -1 where nothing may agree.
    """
    ids = torch.cat([last.unsqueeze(1), draft], 1).clamp(0, vocab - 1)
    judged = torch.where(depth <= limit.unsqueeze(1), draft, -1)
    return ids, judged
