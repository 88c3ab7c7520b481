"""Blocks of training: where they stand in packed sequences, and what they are to predict."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun_train.batch import Batch
from forerun_train.masks import BlockPlaces


@dataclass(frozen=True)
class Blocks:
    """N blocks in each of B sequences, D drafts of each."""

    anchors: Tensor  # [B, N] int64: places in the sequence, in rising order
    positions: Tensor  # [B, N] int64: of the anchors in their documents
    tokens: Tensor  # [B, N, D + 1] int64: the anchor's token, then the labels
    valid: Tensor  # [B, N, D] bool: which labels count; true up to a first false

    def places(self, rows: int, length: int) -> BlockPlaces:
        """Where they stand, for masks."""
        return BlockPlaces(self.anchors - self.positions, self.anchors, rows, length)

    def row_positions(self, rows: int) -> Tensor:
        """[B, N · R] int64: of the rows in their documents."""
        offsets = torch.arange(rows, device=self.anchors.device)
        return (self.positions.unsqueeze(2) + offsets).flatten(1)

    def inputs(self, rows: int, mask_token: int) -> Tensor:
        """[B, N · R] int64: the anchor's token, then masks."""
        ids = self.tokens.new_full((*self.anchors.shape, rows), mask_token)
        ids[:, :, 0] = self.tokens[:, :, 0]
        return ids.flatten(1)


def can_anchor(batch: Batch) -> Tensor:
    """[B, T] bool: tokens whose next one is a label in the same document, the first one apart."""
    documents = batch.document_ids
    follows = batch.loss_mask[:, 1:] & (documents[:, 1:] == documents[:, :-1])
    follows = follows & (documents[:, :-1] >= 0) & (batch.position_ids[:, :-1] > 0)
    return torch.nn.functional.pad(follows, (0, 1))


def sample_anchors(batch: Batch, noise: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Random different places of each sequence, in rising order.

    Args:
        noise: [B, T] float32, uniform.

    Returns:
        anchors [B, N] int64, and whether each is one: sequences may have fewer.
    """
    score = torch.where(can_anchor(batch), noise, noise - 2)
    best = score.topk(min(count, noise.shape[1]), dim=1)
    order = best.indices.sort(dim=1)
    return order.values, (best.values >= 0).gather(1, order.indices)


def blocks_at(batch: Batch, anchors: Tensor, chosen: Tensor, drafts: int) -> Blocks:
    """The blocks at `anchors` [B, N]; `chosen` [B, N] bool: which of them count.

    Labels end at the first one that is not supervised or of another document.
    """
    length = batch.input_ids.shape[1]
    places = anchors.unsqueeze(2) + torch.arange(drafts + 1, device=anchors.device)
    inside, flat = places < length, places.clamp(max=length - 1).flatten(1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, flat).view_as(places)

    documents = at(batch.document_ids)
    valid = at(batch.loss_mask) & inside & (documents == documents[:, :, :1])
    valid = valid[:, :, 1:].long().cumprod(2).bool() & chosen.unsqueeze(2)
    return Blocks(anchors, batch.position_ids.gather(1, anchors), at(batch.input_ids), valid)


def rows_before(values: Tensor, anchors: Tensor, drafts: int) -> Tensor:
    """values [B, T, H] of the tokens from which the target predicts the labels: [B, N, D, H]."""
    places = anchors.unsqueeze(2) + torch.arange(drafts, device=anchors.device)
    flat = places.clamp(max=values.shape[1] - 1).flatten(1)
    picked = values.gather(1, flat.unsqueeze(2).expand(-1, -1, values.shape[2]))
    return picked.view(*places.shape, -1)
