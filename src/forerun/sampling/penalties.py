"""Penalties and logit biases per slot: written at admission, read on the device in steps.

Only requests that have some are written, so that others cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.plan import SlotSampling
from forerun.core.sampling_params import MAX_BIASES
from forerun.kernels.sampling.penalties import NUM_INTS, PenaltyBatch
from forerun.platform.device import upload


class PenaltyTable:
    """The device tables [slots, ...]; see `PenaltyBatch`. New slots have no penalties."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.device = device
        neutral = torch.tensor(SlotSampling().columns("logits"), dtype=torch.float32)
        self._floats = upload(neutral, device).repeat(slots, 1)
        self._ints = torch.zeros(slots, NUM_INTS, dtype=torch.int32, device=device)
        self._bias_ids = torch.zeros(slots, MAX_BIASES, dtype=torch.int32, device=device)
        self._biases = torch.zeros(slots, MAX_BIASES, dtype=torch.float32, device=device)
        self._penalized: set[int] = set()  # slots whose rows are not neutral

    def set(self, rows: Sequence[PackedPenalties]) -> None:
        """Writes the rows of newly admitted requests; each slot at most once per call."""
        written = [row for row in rows if row.penalized or row.slot in self._penalized]
        self._penalized -= {row.slot for row in rows}
        self._penalized |= {row.slot for row in rows if row.penalized}
        if not written:
            return
        slots = upload(torch.tensor([row.slot for row in written]), self.device)
        self._floats[slots] = upload(torch.stack([row.floats for row in written]), self.device)
        self._ints[slots] = upload(torch.stack([row.ints for row in written]), self.device)
        for row in written:
            if row.bias_ids.numel():
                count = row.bias_ids.numel()
                self._bias_ids[row.slot, :count] = upload(row.bias_ids, self.device)
                self._biases[row.slot, :count] = upload(row.biases, self.device)

    def gather(self, slots: Tensor, history: Tensor) -> PenaltyBatch:
        """The parameters of `slots` [B] int64; launches nothing. `history`: of all slots."""
        return PenaltyBatch(slots, self._floats, self._ints, self._bias_ids, self._biases, history)


@dataclass(frozen=True)
class PackedPenalties:
    """Penalties of one request, on the host."""

    slot: int
    penalized: bool
    floats: Tensor  # [NUM_FLOATS] float32
    ints: Tensor  # [NUM_INTS] int32
    bias_ids: Tensor  # [n] int32
    biases: Tensor  # [n] float32

    @classmethod
    def of(cls, slot: int, params: SlotSampling, num_prompt_tokens: int) -> PackedPenalties:
        ids, biases = [i for i, _ in params.logit_bias], [bias for _, bias in params.logit_bias]
        return cls(
            slot,
            params.penalized,
            torch.tensor(params.columns("logits"), dtype=torch.float32),
            torch.tensor([num_prompt_tokens, len(ids)], dtype=torch.int32),
            torch.tensor(ids, dtype=torch.int32),
            torch.tensor(biases, dtype=torch.float32),
        )
