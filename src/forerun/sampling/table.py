"""Sampling parameters per slot: written at admission, read on the device in every step.

The columns' value ranges are constants in `core/sampling_params.py`, which checks requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.plan import SlotSampling
from forerun.core.sampling_params import MAX_STOP_IDS
from forerun.kernels.sampling.params import NUM_FLOATS, STOP_IDS, TEMPERATURE, SamplingBatch
from forerun.platform.device import upload
from forerun.sampling.noise import seed_key


class SamplingTable:
    """The device tables [slots, ...] of every slot's sampling parameters.

    float32: temperature, top_p, min_p. int64: noise key, top_k, min_position, stop ids. New slots
    are greedy.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.device = device
        self._floats = torch.zeros(slots, NUM_FLOATS, dtype=torch.float32, device=device)
        self._ints = torch.zeros(slots, STOP_IDS + MAX_STOP_IDS, dtype=torch.int64, device=device)

    def set(self, slots: Sequence[int], params: Sequence[SlotSampling]) -> None:
        """Writes sampling parameters to their slots; each slot at most once per call."""
        if params:
            index = upload(torch.tensor(slots, dtype=torch.int64), self.device)
            self.set_packed(index, [PackedSampling.of(p) for p in params])

    def set_packed(self, slots: Tensor, packed: Sequence[PackedSampling]) -> None:
        """Writes packed parameters to slots [B] int64, all different.

        Copies to the device without waiting for it; must not be captured in a graph.
        """
        ints = upload(torch.stack([p.ints for p in packed]), self.device)
        self._ints.index_copy_(0, slots, ints)
        floats = upload(torch.stack([p.floats for p in packed]), self.device)
        self._floats.index_copy_(0, slots, floats)

    @property
    def temperature(self) -> Tensor:
        """[slots] float32, a column of the table; 0: greedy."""
        return self._floats[:, TEMPERATURE]

    def gather(self, slots: Tensor) -> SamplingBatch:
        """The parameters of `slots` [B] int64; launches nothing."""
        return SamplingBatch(self._floats, self._ints, slots)


@dataclass(frozen=True)
class PackedSampling:
    """Parameters on the host, in the order of the columns in kernels/sampling/params.py."""

    floats: Tensor  # [FLOATS] float32
    ints: Tensor  # [STOP_IDS + MAX_STOP_IDS] int64

    @classmethod
    def of(cls, params: SlotSampling) -> PackedSampling:
        # Padding repeats an id; where nothing is masked, the ids are read but never used.
        filler = params.stop_ids[0] if params.stop_ids else 0
        stops = [*params.stop_ids, *[filler] * (MAX_STOP_IDS - len(params.stop_ids))]
        ints = [seed_key(params.seed), params.top_k, params.min_position, *stops]
        return cls(
            torch.tensor(params.columns("filter"), dtype=torch.float32),
            torch.tensor(ints, dtype=torch.int64),
        )
