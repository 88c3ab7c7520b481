"""The sampling parameters of a batch, as slots of the device tables."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.core.sampling_params import columns_of

# Columns of the tables, float32 and int64. Kernels have them as numbers (`load_params`).
TEMPERATURE, TOP_P, MIN_P = map(columns_of("filter").index, ("temperature", "top_p", "min_p"))
NUM_FLOATS = len(columns_of("filter"))
KEY, TOP_K, MIN_POSITION, STOP_IDS = 0, 1, 2, 3  # stop ids to the end

MAX_OWN_TOP_K = 64  # largest top-k for which ranks need no logits of each other


@dataclass(frozen=True)
class SamplingBatch:
    """B requests in the tables of S slots; each property gathers one parameter."""

    floats: Tensor  # [S, NUM_FLOATS] float32: temperature (0: greedy), top_p (1: off), min_p
    ints: Tensor  # [S, STOP_IDS + MAX_STOP_IDS] int64: key, top_k (< 1: off), min_position, stops
    slots: Tensor  # [B] int64

    @property
    def temperature(self) -> Tensor:
        """[B] float32; 0: greedy."""
        return self.floats[self.slots, TEMPERATURE]

    @property
    def top_k(self) -> Tensor:
        """[B] int64; below 1: off."""
        return self.ints[self.slots, TOP_K]

    @property
    def top_p(self) -> Tensor:
        """[B] float32; 1: off."""
        return self.floats[self.slots, TOP_P]

    @property
    def min_p(self) -> Tensor:
        """[B] float32; 0: off."""
        return self.floats[self.slots, MIN_P]

    @property
    def key(self) -> Tensor:
        """[B] int64: `seed_key` of the request's seed."""
        return self.ints[self.slots, KEY]

    @property
    def stop_ids(self) -> Tensor:
        """[B, MAX_STOP_IDS] int64, padded with a repeated (or any valid) id."""
        return self.ints[self.slots, STOP_IDS:]

    @property
    def min_position(self) -> Tensor:
        """[B] int64: the first position at which a stop id may be sampled; 0: no limit."""
        return self.ints[self.slots, MIN_POSITION]
