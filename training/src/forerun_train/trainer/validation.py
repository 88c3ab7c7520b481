"""Validation: the loss, and the accept length that greedy serving would have on these texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from forerun_train.batch import Batch
from forerun_train.drafts.blocks import blocks_at, can_anchor, sample_anchors
from forerun_train.drafts.draft import Draft, right_drafts
from forerun_train.hidden_states import FrozenTarget


@dataclass(frozen=True)
class Validation:
    """Scores of a draft on texts that it has not seen."""

    loss: float
    accept_length: float  # tokens per step, the bonus token among them
    reached: tuple[float, ...]  # of all steps, the share whose draft k is accepted

    def as_log(self) -> dict[str, object]:
        """Returns it as a log line has it."""
        return {
            "validation_loss": round(self.loss, 4),
            "accept_length": round(self.accept_length, 4),
            "accepted_by_position": [round(share, 4) for share in self.reached],
        }


def validate(
    draft: Draft,
    target: FrozenTarget,
    batches: Sequence[Batch],
    anchors: int,
    seed: int,
) -> Validation:
    """Scores a draft on packed sequences.

    The draft is asked at every token, and each text is then walked through as serving would: a step
    accepts what is right, and the next one begins behind it. On texts that the target wrote
    greedily this is the accept length of serving.

    Args:
        anchors: blocks of each sequence in a pass, as in training.
    """
    draft.eval()
    generator = torch.Generator(target.device).manual_seed(seed)
    sums = torch.zeros(2, dtype=torch.float64, device=target.device)
    steps = np.zeros(draft.num_drafts + 2)  # [tokens, steps, steps that accept draft 0, 1, ...]
    for batch in batches:
        states = target.hidden_states(batch, draft.target_layer_ids)
        noise = torch.rand(batch.input_ids.shape, generator=generator, device=target.device)
        places, chosen = sample_anchors(batch, noise, anchors)
        blocks = blocks_at(batch, places, chosen, draft.num_drafts)
        with torch.no_grad():
            found = draft(batch, states, blocks, torch.ones((), device=target.device))
        sums += torch.stack([found.total, found.weight]).double()
        able = can_anchor(batch)
        right = torch.zeros(able.shape, dtype=torch.int64, device=able.device)
        for places, chosen in _all_places(able, anchors):
            held = right_drafts(draft, batch, states, places, chosen)
            right.scatter_add_(1, places, held.long().cumprod(2).sum(2))
        steps += walk(right.cpu().numpy(), able.cpu().numpy(), draft.num_drafts)
    draft.train()
    whole = torch.cat([sums, torch.from_numpy(steps).to(sums.device)])
    if dist.is_initialized():
        dist.all_reduce(whole)
    loss, weight, tokens, count, *reached = whole.tolist()
    count = max(count, 1.0)
    return Validation(loss / max(weight, 1e-9), tokens / count, tuple(n / count for n in reached))


def _all_places(able: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """All places of `able` [B, T], in passes of `count`: places [B, N], and which of them count."""
    most = able.sum(1).max()
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)  # every rank makes as many passes
    order = torch.sort((~able).to(torch.uint8), dim=1, stable=True).indices
    passes = []
    for first in range(0, int(most), count):
        index = (first + torch.arange(count, device=able.device)).clamp(max=able.shape[1] - 1)
        fresh = torch.arange(first, first + count, device=able.device) < able.shape[1]
        places = order[:, index]
        passes.append((places, able.gather(1, places) & fresh))
    return passes


def walk(right: np.ndarray, able: np.ndarray, drafts: int) -> np.ndarray:
    """Walks through every run of supervised tokens, as serving does.

    The first token of an answer comes with the prompt, so no step begins at the prompt's last one.

    Args:
        right: [B, T] int, leading right drafts of a block that begins here.
        able: [B, T] bool, where a block may begin.

    Returns:
        [2 + drafts]: tokens, steps, and steps that accept draft 0, draft 1, and so on.
    """
    out = np.zeros(2 + drafts)
    for row, places in zip(right, able, strict=True):
        edges = np.flatnonzero(np.diff(places.astype(np.int8), prepend=0, append=0))
        for first, end in edges.reshape(-1, 2):
            at = first + 1
            while at < end:
                kept = min(int(row[at]) + 1, int(end - at))
                out[:2] += kept, 1
                out[2 : 2 + kept - 1] += 1
                at += kept
    return out
