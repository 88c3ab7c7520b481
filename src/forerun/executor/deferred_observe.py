"""What plain steps put out, kept until the algorithm hears of it.

A draft that reads the target's hidden states has to be told of every row, and telling it of one
costs as much as of many: its weights are read once. While nothing is proposed the draft is not
read,
so the rows wait here, a few for every slot, and are observed together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.executor.resolve import Settings
from forerun.kernels.speculation.ring_buffer import ring_buffer_write
from forerun.speculative.base import TargetOutput


class DeferredObserve:
    """For every slot the newest `rows` outputs; that at position p lies in row p mod `rows`."""

    def __init__(self, rows: int, hidden: Tensor, features: Tensor | None) -> None:
        """hidden [S, rows, H], features [S, rows, n * H]."""
        self.rows = rows
        self._hidden, self._features = hidden, features

    @classmethod
    def of(cls, settings: Settings, device: torch.device) -> DeferredObserve | None:
        """None where the algorithm hears of every step at once."""
        rows, slots = settings.limits.max_pending_observe, settings.limits.slots + 1
        if not rows:
            return None
        size, layers = settings.target.hidden_size, len(settings.caps.target_layers)

        def room(width: int) -> Tensor:
            return torch.zeros(slots, rows, width, dtype=settings.dtype, device=device)

        return cls(rows, room(size), room(size * layers) if layers else None)

    def keep(self, slots: Tensor, positions: Tensor, output: TargetOutput) -> None:
        """A row of each of `slots` [B], at `positions` [B]."""
        ring_buffer_write(self._hidden, slots, positions, output.hidden)
        if self._features is not None and output.features is not None:
            ring_buffer_write(self._features, slots, positions, output.features)

    def take(self, slots: Tensor, positions: Tensor, empty: Tensor) -> TargetOutput:
        """The rows at `positions` [B, rows] int64, zeros where they are `empty` [B, rows]."""

        def of(kept: Tensor) -> Tensor:
            rows = kept[slots.unsqueeze(1), positions % self.rows]
            return rows.masked_fill(empty.unsqueeze(2), 0).flatten(0, 1)

        features = None if self._features is None else of(self._features)
        return TargetOutput(of(self._hidden), features)
