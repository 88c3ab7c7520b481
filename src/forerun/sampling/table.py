"""Sampling parameters per slot: written once at admission, read on the device in every step.

The ranges that the columns can hold are constants in `core/sampling_params.py`, which checks a
request against them before it is admitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core.plan import SlotSampling
from forerun.core.sampling_params import MAX_STOP_IDS
from forerun.kernels.sampling.params import NUM_FLOATS, STOP_IDS, SamplingBatch
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
        """Writes sampling parameters to their slots; each slot at most once per call.

        Two copies to the device, which do not wait for it. Not inside captured graphs.
        """
        if not params:
            return
        floats = [_float_columns(p) for p in params]
        ints = [[slot, *_int_columns(p)] for slot, p in zip(slots, params, strict=True)]
        packed = upload(torch.tensor(ints, dtype=torch.int64), self.device)
        index = packed[:, 0]
        self._ints.index_copy_(0, index, packed[:, 1:])
        values = upload(torch.tensor(floats, dtype=torch.float32), self.device)
        self._floats.index_copy_(0, index, values)

    def gather(self, slots: Tensor) -> SamplingBatch:
        """The parameters of `slots` [B] int64; nothing is read or launched yet."""
        return SamplingBatch(self._floats, self._ints, slots)


def _float_columns(params: SlotSampling) -> list[float]:
    """In the order of the columns in kernels/sampling/params.py, like `_int_columns`."""
    return [params.temperature, params.top_p, params.min_p]


def _int_columns(params: SlotSampling) -> list[int]:
    # Padding repeats an id; where nothing is masked, the ids are read but never used.
    filler = params.stop_ids[0] if params.stop_ids else 0
    stops = [*params.stop_ids, *[filler] * (MAX_STOP_IDS - len(params.stop_ids))]
    return [seed_key(params.seed), params.top_k, params.min_position, *stops]
