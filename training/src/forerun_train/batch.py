"""A batch of packed sequences on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.platform.device import upload


@dataclass(frozen=True)
class HiddenStates:
    """What the target computes for every token of B sequences of T."""

    aux: Tensor  # [B, T, k · H]: outputs of the layers that a draft reads
    final: Tensor  # [B, T, H]: after the final norm


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens, each of several documents."""

    input_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool: whether the token is a label
    document_ids: Tensor  # [B, T] int32, -1 on padding
    position_ids: Tensor  # [B, T] int64, from 0 in each document
    states: HiddenStates | None = None  # where they were stored

    @classmethod
    def of(cls, host: Any, device: torch.device) -> Batch:
        """Copies a batch of the data (`data.packing.PackedBatch`), or one of these, to the
        device.
        """
        states = host.states if isinstance(host, Batch) else None
        if states is not None:
            states = HiddenStates(upload(states.aux, device), upload(states.final, device))
        return cls(
            upload(host.input_ids, device),
            upload(host.loss_mask, device),
            upload(host.document_ids, device),
            upload(host.position_ids, device),
            states,
        )

    def part(self, rows: slice) -> Batch:
        """Some of its sequences."""
        states = self.states
        if states is not None:
            states = HiddenStates(states.aux[rows], states.final[rows])
        return Batch(
            self.input_ids[rows],
            self.loss_mask[rows],
            self.document_ids[rows],
            self.position_ids[rows],
            states,
        )
