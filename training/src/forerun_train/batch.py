"""A batch of packed sequences on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.platform.device import upload


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens, each of several documents."""

    input_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool: whether the token is a label
    document_ids: Tensor  # [B, T] int32, -1 on padding
    position_ids: Tensor  # [B, T] int64, from 0 in each document

    @classmethod
    def of(cls, host: Any, device: torch.device) -> Batch:
        """Copies a batch of the data (`data.packing.PackedBatch`) to the device."""
        fields = (host.input_ids, host.loss_mask, host.document_ids, host.position_ids)
        return cls(*(upload(each, device) for each in fields))

    def part(self, rows: slice) -> Batch:
        """Some of its sequences."""
        fields = (self.input_ids, self.loss_mask, self.document_ids, self.position_ids)
        return Batch(*(each[rows] for each in fields))
