"""Samples tokens from logits with the sampling parameters of each request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core.plan import SlotSampling
from forerun.core.tokens import INVALID_TOKEN
from forerun.kernels.runtime.jit import use_triton
from forerun.kernels.sampling.argmax import argmax
from forerun.kernels.sampling.params import MAX_OWN_TOP_K, SamplingBatch
from forerun.kernels.sampling.sample import mask_stop_tokens, sample_tokens
from forerun.sampling.filters import filtered_weights, gaps
from forerun.sampling.noise import gumbel_scores


@dataclass(frozen=True)
class SamplingFlags:
    """Which sampling operations run for a batch; known on the host.

    A flag may be True although no request needs the operation (a captured graph serves many
    batches), but not False if one does. The result does not depend on it.
    """

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    min_tokens: bool = False
    penalties: bool = False  # or logit biases
    edits: tuple[str, ...] = ()  # of `penalties`: names of the parameters, sorted
    whole_rows: bool = False  # filters that may keep more than the best `MAX_OWN_TOP_K` tokens

    @classmethod
    def of(cls, params: Iterable[SlotSampling]) -> SamplingFlags:
        """The operations that a batch of requests needs."""
        batch = list(params)
        sampled, edited = [p for p in batch if not p.greedy], [p for p in batch if p.penalized]
        return cls(
            sampled=bool(sampled),
            top_k=any(p.top_k > 0 for p in sampled),
            top_p=any(p.top_p < 1 for p in sampled),
            min_p=any(p.min_p > 0 for p in sampled),
            min_tokens=any(bool(p.stop_ids) for p in batch),
            penalties=bool(edited),
            edits=tuple(sorted({name for p in edited for name in p.edits})),
            whole_rows=any(
                p.top_k > MAX_OWN_TOP_K or (p.top_p < 1 and p.top_k < 1) for p in sampled
            ),
        )

    def widened(self, vocab_is_divided: bool = False) -> SamplingFlags:
        """The one of `captured_flags` that serves this batch, or one with penalties."""
        flags = GREEDY
        if self.sampled or self.min_tokens:
            flags = SAMPLED_FROM_OWN if vocab_is_divided and not self.whole_rows else SAMPLED
        return replace(flags, penalties=self.penalties, edits=self.edits)


GREEDY = SamplingFlags()
SAMPLED = SamplingFlags(
    sampled=True, top_k=True, top_p=True, min_p=True, min_tokens=True, whole_rows=True
)
SAMPLED_FROM_OWN = replace(SAMPLED, whole_rows=False)


def captured_flags(vocab_is_divided: bool) -> tuple[SamplingFlags, ...]:
    """The flags of captured steps. Ranks sample from their own logits unless a request filters
    whole rows.
    """
    return (GREEDY, SAMPLED_FROM_OWN, SAMPLED) if vocab_is_divided else (GREEDY, SAMPLED)


def sample(
    logits: Tensor,
    positions: Tensor,
    batch: SamplingBatch,
    flags: SamplingFlags,
    invalid: int = INVALID_TOKEN,
) -> Tensor:
    """Samples a token at every position.

    Greedy requests take the largest logit, of equal ones the lowest id. Others sample from the
    filtered distribution with noise keyed by (seed, position).

    Args:
        logits: [B, W, V], any float dtype. On a GPU, stop ids are masked in place.
        positions: [B, W] integers: the absolute positions of the tokens to be sampled.
        batch: the sampling parameters of the B requests.
        flags: the operations to run.
        invalid: the result for rows of logits that have a NaN or +inf, or are all -inf. Drafts
            pass an id that they can embed.

    Returns:
        [B, W] int64.
    """
    if not use_triton(logits):
        return sample_ref(logits, positions, batch, flags, invalid)
    flat, at = logits.flatten(0, 1), positions.flatten()
    if flags.min_tokens:
        mask_stop_tokens(flat, at, batch)
    if not flags.sampled:
        return argmax(flat, invalid).view(positions.shape)
    tokens = sample_tokens(flat, at, batch, flags.top_k, flags.top_p, invalid)
    return tokens.view(positions.shape)


def sample_ref(
    logits: Tensor,
    positions: Tensor,
    batch: SamplingBatch,
    flags: SamplingFlags,
    invalid: int = INVALID_TOKEN,
) -> Tensor:
    """Reference implementation of `sample`."""
    if flags.min_tokens:
        logits = _without_stop_tokens(logits, positions, batch)
    if not flags.sampled:
        return argmax(logits.flatten(0, 1), invalid).view(logits.shape[:2])

    gap = gaps(logits.float())
    temperature = batch.temperature[:, None]
    greedy = temperature <= 0
    weights = filtered_weights(
        gap,
        torch.where(greedy, 1.0, temperature),
        batch.top_k[:, None] if flags.top_k else None,
        batch.top_p[:, None] if flags.top_p else None,
        batch.min_p[:, None] if flags.min_p else None,
    )
    scores = gumbel_scores(weights, batch.key[:, None], positions)
    # In greedy rows the score is the gap, which is 0 at the largest logit only.
    tokens = torch.where(greedy[..., None], gap, scores).argmin(-1)
    # The smallest gap is 0, except in invalid rows.
    return torch.where(gap.amin(-1) == 0, tokens, invalid)


def without_stop_tokens(logits: Tensor, positions: Tensor, batch: SamplingBatch) -> Tensor:
    """Masks stop ids as `sample` does, on a GPU in place; for edits that look at whole rows."""
    if not use_triton(logits):
        return _without_stop_tokens(logits, positions, batch)
    mask_stop_tokens(logits.flatten(0, 1), positions.flatten(), batch)
    return logits


def _without_stop_tokens(logits: Tensor, positions: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits [B, W, V], with -inf at stop ids in positions below `min_position`."""
    index = batch.stop_ids[:, None, :].expand(-1, positions.shape[1], -1)
    early = (positions < batch.min_position[:, None])[..., None]
    # Repeated ids write the same value, so their order does not matter.
    values = logits.gather(-1, index).masked_fill_(early, -torch.inf)
    return logits.scatter(-1, index, values)
