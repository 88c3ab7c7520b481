"""Samples from vocab-parallel logits: every tensor-parallel rank has those of some token ids.

The tokens are those that `sample` takes from all logits.

`sample_across` moves a few numbers per row. Noise is keyed by the token's id, so a rank scores its
own tokens, given the largest logit of all; the best score of all ranks wins. Top-k needs the k
tokens of the largest logits of each rank, among which are those of all, and top-p after it no
others. Top-p of whole rows, which may keep any number of tokens, is not for this.

    all_reduce_max   [B, W]          the largest logit
    all_gather       [B, W, 64 · n]  with top-k: the (gap, id) of each rank's candidates
    all_reduce_max   [B, W]          the best (score, id); kernels send it with the candidates

`sample_by_rows` serves every filter: each rank samples its share of the rows, from all of their
logits. Less is moved and sampled than by ranks that gather all logits of all rows.

    all_to_all       [size, R / size, n]  the logits of each rank's rows
    all_gather       [R / size]           the tokens
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.tokens import INVALID_TOKEN
from forerun.kernels.runtime.jit import use_triton
from forerun.kernels.sampling.params import MAX_OWN_TOP_K, SamplingBatch
from forerun.kernels.sampling.sample import group_maxima, mask_stop_tokens
from forerun.kernels.sampling.sample_own import choose, sample_own
from forerun.kernels.sampling.sort_keys import from_sort_keys, sort_keys
from forerun.layers.communication import Communicator
from forerun.layers.sharding import VocabShard
from forerun.sampling.filters import filtered_weights
from forerun.sampling.noise import gumbel_scores
from forerun.sampling.sampler import SamplingFlags, sample

_NO_CANDIDATE = (0x7F800000 << 32) | 0x7FFFFFFF  # an infinite gap


def sample_across(
    own: Tensor,
    vocab: VocabShard,
    positions: Tensor,
    batch: SamplingBatch,
    flags: SamplingFlags,
    comm: Communicator,
) -> Tensor:
    """`sample`, without `flags.whole_rows`, on every rank.

    Args:
        own: [B, W, n], the logits of this rank's ids. On a GPU, stop ids are masked in place.
        vocab: these ids.
        positions, batch, flags: as those of `sample`.

    Returns:
        [B, W] int64.
    """
    assert not flags.whole_rows
    if use_triton(own):
        return _sample_with_kernels(own, vocab, positions, batch, flags, comm)
    own = own.float()
    if flags.min_tokens:
        own = _without_stop_tokens(own, vocab.first, positions, batch)
    largest = own.amax(-1)
    largest = comm.all_reduce_max(torch.where(largest.isnan(), torch.inf, largest))
    gap = (largest[..., None] - own).abs_()
    temperature = batch.temperature[:, None]
    greedy = temperature <= 0
    warm = torch.where(greedy, 1.0, temperature)
    min_p = batch.min_p[:, None] if flags.min_p else None
    ids = vocab.first + torch.arange(vocab.count, dtype=torch.int64, device=own.device)
    scores = gap
    if flags.sampled:
        weights = filtered_weights(gap, warm, min_p=min_p)
        noisy = gumbel_scores(weights, batch.key[:, None], positions, ids)
        scores = torch.where(greedy[..., None], gap, noisy)
    best = -comm.all_reduce_max(-sort_keys(scores, ids).amin(-1))
    if flags.top_k:
        gap, ids = _candidates(gap, ids, comm)
        top_k, top_p = batch.top_k[:, None], batch.top_p[:, None]
        weights = filtered_weights(gap, warm, top_k, top_p if flags.top_p else None, min_p)
        scores = gumbel_scores(weights, batch.key[:, None], positions, ids)
        best = torch.where((top_k > 0) & ~greedy, sort_keys(scores, ids).amin(-1), best)
    return torch.where(largest.isfinite(), from_sort_keys(best)[1], INVALID_TOKEN)


def _sample_with_kernels(
    own: Tensor,
    vocab: VocabShard,
    positions: Tensor,
    batch: SamplingBatch,
    flags: SamplingFlags,
    comm: Communicator,
) -> Tensor:
    rows, at = own.flatten(0, 1), positions.flatten()
    if flags.min_tokens:
        mask_stop_tokens(rows, at, batch, vocab.first)
    maxima = group_maxima(rows)
    largest = comm.all_reduce_max(maxima.amax(-1))
    best = sample_own(rows, maxima, largest, at, batch, vocab.first, flags.top_k)
    best = comm.all_gather(best)
    return choose(best, comm.size, largest, at, batch, vocab.vocab_size).view(positions.shape)


def sample_by_rows(
    own: Tensor,
    vocab: VocabShard,
    positions: Tensor,
    batch: SamplingBatch,
    flags: SamplingFlags,
    comm: Communicator,
) -> Tensor:
    """`sample`, of which each rank does its share of the rows; arguments as `sample_across`."""
    rows, width = positions.numel(), positions.shape[1]
    share = -(-rows // comm.size)
    padding = (0, vocab.rows - vocab.count, 0, share * comm.size - rows)
    own = F.pad(own.flatten(0, 1), padding, value=-torch.inf) if any(padding) else own
    logits = comm.all_to_all(own.view(comm.size, share, vocab.rows)).transpose(0, 1)
    logits = logits.reshape(share, -1)[:, : vocab.vocab_size]
    # Rows past the last one are all -inf: they yield no token and skip the search for thresholds.
    row = torch.arange(share * comm.rank, share * (comm.rank + 1), device=own.device)
    row = row.clamp_(max=rows - 1)
    tokens = sample(
        logits.unsqueeze(1),
        positions.flatten()[row].unsqueeze(1),
        replace(batch, slots=batch.slots[row // width]),
        flags,
    )
    return comm.all_gather(tokens.squeeze(1))[:rows].view(positions.shape)


def _candidates(gap: Tensor, ids: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """The smallest gaps of all ranks and their ids, [B, W, MAX_OWN_TOP_K], in order."""
    keys = sort_keys(gap, ids)
    missing = max(0, MAX_OWN_TOP_K - keys.shape[-1])
    own = F.pad(keys, (0, missing), value=_NO_CANDIDATE)
    own = own.topk(MAX_OWN_TOP_K, largest=False).values
    keys = comm.all_gather(own).sort(-1).values[..., :MAX_OWN_TOP_K]
    return from_sort_keys(keys)


def _without_stop_tokens(
    own: Tensor, first_id: int, positions: Tensor, batch: SamplingBatch
) -> Tensor:
    """-inf at this rank's stop ids in positions below `min_position`."""
    count = own.shape[-1]
    ids = batch.stop_ids - first_id
    # Ids of other ranks are written behind the last one.
    index = torch.where((ids < 0) | (ids >= count), count, ids)
    stops = torch.zeros(len(ids), count + 1, dtype=torch.bool, device=own.device)
    stops = stops.scatter_(1, index, True)[:, :count]
    early = positions < batch.min_position[:, None]
    return own.masked_fill(stops[:, None] & early[..., None], -torch.inf)
