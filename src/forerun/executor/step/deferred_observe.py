"""Deferred observe: stores the target's hidden states of plain steps until the algorithm drafts.

A draft model that reads the target's hidden states must observe every committed token, and one call
costs about as much for one token as for sixteen, because it reads the same weights. So the states
of plain steps are stored in a ring buffer per slot and observed together later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.speculation.ring_buffer import ring_buffer_read, ring_buffer_write


class DeferredObserve:
    """The last `capacity` states per slot; that of position p is at index p mod `capacity`."""

    def __init__(
        self,
        slots: int,
        capacity: int,
        hidden_size: int,
        reads_hidden_states: bool,
        num_aux_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            slots: number of slots with the padding slot.
            reads_hidden_states: whether the final ones are kept too.
            num_aux_layers: captured layers.
        """
        self.capacity = capacity

        def buffer(size: int) -> Tensor:
            return torch.zeros(slots, capacity, size, dtype=dtype, device=device)

        self.hidden_states = buffer(hidden_size) if reads_hidden_states else None
        self.aux_hidden_states = buffer(hidden_size * num_aux_layers) if num_aux_layers else None
        self._none = torch.empty(0, dtype=dtype, device=device)

    def keep(
        self, slots: Tensor, positions: Tensor, hidden_states: Tensor, aux: Tensor | None
    ) -> None:
        """Stores states [B, ·] of the tokens at positions [B] of slots [B]."""
        if self.hidden_states is not None:
            ring_buffer_write(self.hidden_states, slots, positions, hidden_states)
        if self.aux_hidden_states is not None and aux is not None:
            ring_buffer_write(self.aux_hidden_states, slots, positions, aux)

    def take(self, slots: Tensor, positions: Tensor, empty: Tensor) -> tuple[Tensor, Tensor | None]:
        """(hidden, aux hidden states) [B * capacity, ·] at `positions` [B, capacity] int64.

        Zeros where `empty` [B, capacity]. Hidden states that are not kept have no columns.
        """

        def read(kept: Tensor | None) -> Tensor | None:
            if kept is None:
                return None
            return ring_buffer_read(kept, slots, positions, empty).flatten(0, 1)

        hidden_states = read(self.hidden_states)
        if hidden_states is None:
            hidden_states = self._none.view(positions.numel(), 0)
        return hidden_states, read(self.aux_hidden_states)
