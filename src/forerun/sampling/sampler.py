"""From logits to tokens: the verify pass draws one at every row, by the request's own rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.plan import SlotSampling
from forerun.kernels.runtime.jit import use_triton
from forerun.kernels.sampling.argmax import argmax
from forerun.kernels.sampling.sampling import (
    KEY,
    MIN_P,
    MIN_POSITION,
    STOP_IDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    mask_stop_tokens,
    sample_rows,
)
from forerun.sampling.filters import filtered_weights, gaps
from forerun.sampling.noise import race


@dataclass(frozen=True)
class SamplingFlags:
    """What the host knows about a batch: which operations run, never what comes out.

    A flag may be True though no row needs it (a captured graph serves many batches); it must not
    be False where one does.
    """

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    min_tokens: bool = False

    @classmethod
    def of(cls, params: Iterable[SlotSampling]) -> SamplingFlags:
        """The flags that a batch of requests needs."""
        batch = list(params)
        drawn = [p for p in batch if not p.greedy]
        return cls(
            sampled=bool(drawn),
            top_k=any(p.top_k > 0 for p in drawn),
            top_p=any(p.top_p < 1 for p in drawn),
            min_p=any(p.min_p > 0 for p in drawn),
            min_tokens=any(bool(p.stop_ids) for p in batch),
        )

    def widened(self) -> SamplingFlags:
        """`GREEDY` or `SAMPLED`: kernels are compiled for these two at start."""
        return SAMPLED if self.sampled or self.min_tokens else GREEDY


GREEDY = SamplingFlags()
SAMPLED = SamplingFlags(sampled=True, top_k=True, top_p=True, min_p=True, min_tokens=True)


@dataclass(frozen=True)
class SamplingRows:
    """The rules of B requests: rows of the slots' tables, gathered when they are asked for."""

    floats: Tensor  # [S, 3] float32, columns as in kernels/sampling.py
    ints: Tensor  # [S, 3 + MAX_STOP_IDS] int64
    slots: Tensor  # [B] int64

    @property
    def temperature(self) -> Tensor:
        """[B] float32; 0: greedy."""
        return self.floats[self.slots, TEMPERATURE]

    @property
    def top_k(self) -> Tensor:
        """[B] int64; -1: off."""
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
        """[B] int64; positions below may not draw a stop id; 0: off."""
        return self.ints[self.slots, MIN_POSITION]


def sample(logits: Tensor, positions: Tensor, rows: SamplingRows, flags: SamplingFlags) -> Tensor:
    """Draws a token at every row.

    A greedy request takes the largest logit, the lowest id among equals. Others draw from the
    filtered distribution with noise keyed by (seed, position).

    Args:
        logits: [B, W, V], any float dtype. On a GPU stop ids may be masked in place.
        positions: [B, W] integers: the absolute position of the token to be drawn.
        rows: the rules of the B requests.
        flags: which of them are in use.

    Returns:
        [B, W] int64.
    """
    if not use_triton(logits):
        return sample_ref(logits, positions, rows, flags)
    flat, at = logits.flatten(0, 1), positions.flatten()
    if flags.min_tokens:
        mask_stop_tokens(flat, at, rows.slots, rows.ints)
    if not flags.sampled:
        return argmax(flat).view(positions.shape)
    drawn = sample_rows(flat, at, rows.slots, rows.floats, rows.ints, flags.top_k, flags.top_p)
    return drawn.view(positions.shape)


def sample_ref(
    logits: Tensor, positions: Tensor, rows: SamplingRows, flags: SamplingFlags
) -> Tensor:
    """`sample` in plain PyTorch, and what the kernels are held to."""
    if flags.min_tokens:
        logits = _without_stops(logits, positions, rows)
    if not flags.sampled:
        return argmax(logits.flatten(0, 1)).view(logits.shape[:2])

    gap = gaps(logits.float())
    temperature = rows.temperature[:, None]
    greedy = temperature <= 0
    weights = filtered_weights(
        gap,
        torch.where(greedy, 1.0, temperature),
        rows.top_k[:, None] if flags.top_k else None,
        rows.top_p[:, None] if flags.top_p else None,
        rows.min_p[:, None] if flags.min_p else None,
    )
    scores = race(weights, rows.key[:, None], positions)
    # Greedy rows: the gap is 0 at the largest logit and nowhere else, so one argmin serves all.
    return torch.where(greedy[..., None], gap, scores).argmin(-1)


def _without_stops(logits: Tensor, positions: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [B, W, V] with the requests' stop ids at -inf where they may not be drawn yet."""
    index = rows.stop_ids[:, None, :].expand(-1, positions.shape[1], -1)
    early = (positions < rows.min_position[:, None])[..., None]
    # Repeated ids write the same value, so their order does not matter.
    values = logits.gather(-1, index).masked_fill_(early, -torch.inf)
    return logits.scatter(-1, index, values)
