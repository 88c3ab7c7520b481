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
        num_aux_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`slots`: number of slots with the padding slot; `num_aux_layers`: captured layers."""
        self.capacity = capacity

        def buffer(size: int) -> Tensor:
            return torch.zeros(slots, capacity, size, dtype=dtype, device=device)

        self.hidden_states = buffer(hidden_size)
        self.aux_hidden_states = buffer(hidden_size * num_aux_layers) if num_aux_layers else None

    def keep(
        self, slots: Tensor, positions: Tensor, hidden_states: Tensor, aux: Tensor | None
    ) -> None:
        """Stores states [B, ·] of the tokens at positions [B] of slots [B]."""
        ring_buffer_write(self.hidden_states, slots, positions, hidden_states)
        if self.aux_hidden_states is not None and aux is not None:
            ring_buffer_write(self.aux_hidden_states, slots, positions, aux)

    def take(self, slots: Tensor, positions: Tensor, empty: Tensor) -> tuple[Tensor, Tensor | None]:
        """(hidden, aux hidden states) [B * capacity, ·] at `positions` [B, capacity] int64.

        Zeros where `empty` [B, capacity].
        """

        def read(kept: Tensor) -> Tensor:
            return ring_buffer_read(kept, slots, positions, empty).flatten(0, 1)

        aux = None if self.aux_hidden_states is None else read(self.aux_hidden_states)
        return read(self.hidden_states), aux
