"""Sampling rules per slot: written once on admission, read on the device in every step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from forerun.core.errors import RequestError
from forerun.core.request import Request
from forerun.core.sampling_params import MAX_STOP_IDS, SamplingParams
from forerun.kernels.sampling.sampling import FLOATS, STOP_IDS
from forerun.platform.device import upload
from forerun.sampling.noise import seed_key
from forerun.sampling.sampler import SamplingRows


def check_stop_ids(params: SamplingParams, stop_ids: Collection[int]) -> None:
    """A request's stop ids (EOS and its own) must fit into the table if they are ever masked.

    Raises:
        RequestError: `min_new_tokens` together with more than MAX_STOP_IDS stop ids.
    """
    if params.min_new_tokens > 0 and len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(
            f"min_new_tokens works with at most {MAX_STOP_IDS} stop ids (EOS included), got"
            f" {len(stop_ids)}; give fewer stop_token_ids or set min_new_tokens=0."
        )


class SamplingTable:
    """Device rows [slots, …] of every request's rules. Fresh slots are greedy."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.device = device
        self._floats = torch.zeros(slots, FLOATS, dtype=torch.float32, device=device)
        self._ints = torch.zeros(slots, STOP_IDS + MAX_STOP_IDS, dtype=torch.int64, device=device)

    def set(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Write the rules of `requests` to their slots; each slot at most once a call.

        Two copies to the device, which do not wait for it. Outside of captured graphs.
        """
        if not requests:
            return
        floats = [_float_row(r) for r in requests]
        ints = [[slot, *_int_row(r)] for slot, r in zip(slots, requests, strict=True)]
        packed = upload(torch.tensor(ints, dtype=torch.int64), self.device)
        index = packed[:, 0]
        self._ints.index_copy_(0, index, packed[:, 1:])
        values = upload(torch.tensor(floats, dtype=torch.float32), self.device)
        self._floats.index_copy_(0, index, values)

    def gather(self, slots: Tensor) -> SamplingRows:
        """The rules of `slots` [B] int64; nothing is read or launched yet."""
        return SamplingRows(self._floats, self._ints, slots)


def _float_row(request: Request) -> list[float]:
    """In the order of the columns in kernels/sampling.py, like `_int_row`."""
    params = request.params
    return [0.0 if params.greedy else params.temperature, params.top_p, params.min_p]


def _int_row(request: Request) -> list[int]:
    params, stops = request.params, sorted(request.stop_ids)
    early = params.min_new_tokens > 0 and bool(stops)
    if early:
        check_stop_ids(params, stops)
    # Where nothing is masked, the ids are read but never used: any valid id does.
    padded = [*stops, *[stops[0]] * (MAX_STOP_IDS - len(stops))] if early else [0] * MAX_STOP_IDS
    # The first new token stands at position len(prompt).
    min_position = len(request.prompt) + params.min_new_tokens if early else 0
    return [seed_key(request.seed), params.top_k, min_position, *padded]
