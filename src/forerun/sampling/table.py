"""Sampling rules per slot: written once on admission, read on the device in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core.plan import SlotSampling
from forerun.core.sampling_params import MAX_STOP_IDS
from forerun.kernels.sampling.sampling import FLOATS, STOP_IDS
from forerun.platform.device import upload
from forerun.sampling.noise import seed_key
from forerun.sampling.sampler import SamplingRows


class SamplingTable:
    """Device rows [slots, …] of every request's rules. Fresh slots are greedy."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.device = device
        self._floats = torch.zeros(slots, FLOATS, dtype=torch.float32, device=device)
        self._ints = torch.zeros(slots, STOP_IDS + MAX_STOP_IDS, dtype=torch.int64, device=device)

    def set(self, slots: Sequence[int], params: Sequence[SlotSampling]) -> None:
        """Writes sampling parameters to their slots; each slot at most once a call.

        Two copies to the device, which do not wait for it. Outside of captured graphs.
        """
        if not params:
            return
        floats = [_float_row(p) for p in params]
        ints = [[slot, *_int_row(p)] for slot, p in zip(slots, params, strict=True)]
        packed = upload(torch.tensor(ints, dtype=torch.int64), self.device)
        index = packed[:, 0]
        self._ints.index_copy_(0, index, packed[:, 1:])
        values = upload(torch.tensor(floats, dtype=torch.float32), self.device)
        self._floats.index_copy_(0, index, values)

    def gather(self, slots: Tensor) -> SamplingRows:
        """The rules of `slots` [B] int64; nothing is read or launched yet."""
        return SamplingRows(self._floats, self._ints, slots)


def _float_row(params: SlotSampling) -> list[float]:
    """In the order of the columns in kernels/sampling, like `_int_row`."""
    return [params.temperature, params.top_p, params.min_p]


def _int_row(params: SlotSampling) -> list[int]:
    # Padding repeats an id; where nothing is masked, the ids are read but never used.
    filler = params.stop_ids[0] if params.stop_ids else 0
    stops = [*params.stop_ids, *[filler] * (MAX_STOP_IDS - len(params.stop_ids))]
    return [seed_key(params.seed), params.top_k, params.min_position, *stops]
