"""Draft trees: their shape from parents, what a verify pass accepts of them, K/V moved together.

The rows of a request in a step: row 0 is the newest token, the root; row i + 1 holds drafted token
i, and its parent is an earlier row. A row attends to the context and to its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ROWS = 64  # rows of a tree, the root included: the bits of an int64


@dataclass(frozen=True)
class Tree:
    """B trees of W rows."""

    parents: Tensor  # [B, W] int64, a root's is 0
    depth: Tensor  # [B, W] int32, a root's is 0
    ancestors: Tensor  # [B, W, W] bool: row i descends from row j, or is it

    @classmethod
    def of(cls, parents: Tensor) -> Tree:
        """From parents [B, W - 1] of the drafted rows, each below its own row.

        Ancestors are found by doubling: after n rounds those up to 2^n steps up are known.
        """
        batch, rows = parents.shape[0], parents.shape[1] + 1
        root = parents.new_zeros(batch, 1)
        earlier = torch.arange(rows - 1, device=parents.device)
        up = torch.cat([root, torch.minimum(parents, earlier).clamp_min(0)], 1)
        own = torch.eye(rows, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        seen, jump = own, up
        for _ in range((rows - 1).bit_length()):
            seen = seen | seen.gather(1, jump.unsqueeze(2).expand(-1, -1, rows))
            jump = jump.gather(1, jump)
        return cls(up, seen.sum(2, dtype=torch.int32) - 1, seen)

    @property
    def bits(self) -> Tensor:
        """[B, W] int64: bit j of row i says whether i sees row j."""
        place = torch.arange(self.depth.shape[1], device=self.depth.device)
        return (self.ancestors.long() << place).sum(2)

    def accept(self, draft: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """The longest path on which every drafted token is what its parent's row drew.

        Args:
            draft: [B, W - 1] int64.
            drawn: [B, W] int64, y_i ~ p_i at every row.

        Returns:
            path [B, W] int64: the rows of the path from the root, behind its end the row itself;
            new [B] int32: its length. The token committed for row path[i] is drawn[path[i]].
        """
        agree = draft == drawn.gather(1, self.parents[:, 1:])
        agree = torch.cat([agree.new_ones(agree.shape[0], 1), agree], 1)
        # A row stands if nobody on the way to it failed.
        stands = ~(self.ancestors & ~agree.unsqueeze(1)).any(2)
        path = torch.arange(stands.shape[1], device=draft.device).expand_as(drawn)
        # Rows that do not stand write to a column past the end.
        column = torch.where(stands, self.depth.long(), stands.shape[1])
        room = torch.cat([path, path[:, :1]], 1)
        path = room.scatter(1, column, path)[:, :-1]
        new = torch.where(stands, self.depth, 0).amax(1) + 1
        return path, new.int()


def move_rows(data: Tensor, source: Tensor, target: Tensor) -> None:
    """Copies pool rows `source` to `target` [R] int64 in every layer of `data`.

    data: [2, L, pages, P, Hkv, D], any dtype. All rows are read before any is written.
    """
    flat = data.view(torch.uint8) if data.dtype.itemsize == 1 else data
    flat = flat.flatten(2, 3)
    flat[:, :, target] = flat[:, :, source]
