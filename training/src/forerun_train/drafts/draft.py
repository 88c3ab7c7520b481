"""Drafts in training: a body, a head, and the loss of all blocks of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forerun.models.dflash_config import DFlashConfig
from forerun_train.batch import Batch, HiddenStates
from forerun_train.drafts.blocks import Blocks, blocks_at, rows_before
from forerun_train.drafts.body import DFlashBody
from forerun_train.drafts.heads import Rows, TrainingHead
from forerun_train.hidden_states import FrozenTarget
from forerun_train.masks import MaskShape, blocks_after_context, make_mask
from forerun_train.objectives import BlockLoss, Chunk, Mix, PositionWeights, chunked_loss

# Logits of a chunk, at most.
CHUNK_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 24}


@dataclass(frozen=True)
class Objective:
    """What is minimised."""

    mix: Mix
    weights: PositionWeights


class DraftVocabulary:
    """The columns of a draft's LM head: all tokens, or the most frequent ones."""

    def __init__(self, target: FrozenTarget, ids: Tensor | None = None) -> None:
        """`ids` [V_d] int64, rising: tokens that the draft has; None: all."""
        self.ids = None if ids is None else ids.to(target.device)
        self.target = target
        self.head = target.head if self.ids is None else target.head[self.ids]
        self._columns: Tensor | None = None
        if self.ids is not None:
            columns = torch.full((len(target.head),), -1, device=target.device)
            columns[self.ids] = torch.arange(len(self.ids), device=target.device)
            self._columns = columns

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V_d]."""
        return self.target.capped(nn.functional.linear(hidden, self.head))

    def columns(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Labels as columns, and which of them [n, D] still count: those up to a foreign one."""
        if self._columns is None:
            return tokens, valid
        columns = self._columns[tokens]
        known = (columns >= 0).long().cumprod(-1).bool()
        return columns.clamp(min=0), valid & known


def even_part(count: int, most: int) -> int:
    """A size of parts, up to `most`, that divides `count`; or that leaves one smaller part."""
    fewest = -(-count // min(most, count))
    whole = (parts for parts in range(fewest, 2 * fewest) if not count % parts)
    return -(-count // next(whole, fewest))


class Draft(nn.Module, ABC):
    """A body that gives hidden states of blocks or chains, and a head that scores drafts.

    Parameters are those of the checkpoint, under `body.` and `head.`.
    """

    body: nn.Module
    target_layer_ids: tuple[int, ...]
    num_drafts: int  # D, of a block
    first_row = 0  # of those in a block, the first one that predicts

    def __init__(
        self, body: nn.Module, head: TrainingHead, vocabulary: DraftVocabulary, objective: Objective
    ) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.vocabulary, self._objective = vocabulary, objective
        self.compiled: dict[str, Callable[..., Any]] = {}  # not parts: their weights stand above

    def compile_parts(self, divided: bool = False) -> None:
        """Compiles the body and the loss, for shapes that stay the same.

        `divided`: among ranks; then layer by layer, since each is gathered when it runs.
        """
        compiled: Any = torch.compile
        self.compiled["loss"] = compiled(self._chunk_loss, dynamic=False)
        if not divided:
            self.compiled["body"] = compiled(self.body, dynamic=False)
            return
        for layer in self.layers():
            layer.compile(dynamic=False)

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The parts of the body that are gathered one by one, where they are divided."""

    @abstractmethod
    def hidden(self, batch: Batch, states: HiddenStates, blocks: Blocks) -> Tensor:
        """Hidden states of the rows of all blocks after the final norm, [B, N, R, H]."""

    def forward(
        self, batch: Batch, states: HiddenStates, blocks: Blocks, done: Tensor
    ) -> BlockLoss:
        """The loss of all blocks.

        Args:
            states: of the target, for the tokens of `batch`.
            done: part of the run that is done, float32, on the device.
        """
        hidden = self.hidden(batch, states, blocks).flatten(0, 1)  # [n, R, H]
        chunk = self.chunk(states, blocks, done)
        limit = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cpu"])
        most = max(1, limit // (self.num_drafts * len(self.vocabulary.head)))
        size = even_part(len(hidden), most)
        loss = self.compiled.get("loss", self._chunk_loss)
        return chunked_loss(loss, self.head, hidden, chunk, size)

    def chunk(self, states: HiddenStates, blocks: Blocks, done: Tensor) -> Chunk:
        """What the loss reads of each block; all tensors begin with [n]."""
        tokens, valid = blocks.tokens.flatten(0, 1), blocks.valid.flatten(0, 1)
        before, embeds = tokens[:, :-1], None
        target_rows = None
        if self._objective.mix.reads_target or self.head.reads_target:
            target_rows = rows_before(states.final, blocks.anchors, self.num_drafts).flatten(0, 1)
        if self.head.reads_embeddings:
            embeds = self.vocabulary.target.embed(before)
        labels, valid = self.vocabulary.columns(tokens[:, 1:], valid)
        return {
            "before": before,
            "labels": labels,
            "valid": valid,
            "target": target_rows,
            "embeds": embeds,
            "done": done.expand(len(tokens)),
        }

    def rows(self, hidden: Tensor, chunk: Mapping[str, Any]) -> Rows:
        """The rows that predict, of blocks with hidden states [n, R, H]; `chunk`: theirs."""
        first, vocabulary = self.first_row, self.vocabulary
        predicting = hidden[:, first : first + self.num_drafts]
        target = chunk["target"]
        return Rows(
            predicting,
            None if self.head.has_lm_head else vocabulary.logits(predicting),
            chunk["before"],
            chunk["labels"],
            chunk["valid"],
            None if target is None else vocabulary.logits(target),
            chunk["embeds"],
            hidden[:, :first],
        )

    def _chunk_loss(
        self, parameters: Mapping[str, Tensor], hidden: Tensor, chunk: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.rows(hidden, chunk)
        arguments = rows, self._objective.mix, self._objective.weights, chunk["done"][0]
        found = functional_call(self.head, dict(parameters), arguments)
        return found.total, found.weight.detach(), (found.drafts == rows.labels) & rows.valid


class BlockDraft(Draft):
    """A DFlash body: a block of masks in one pass."""

    body: DFlashBody

    def __init__(
        self,
        config: DFlashConfig,
        body: DFlashBody,
        head: TrainingHead,
        vocabulary: DraftVocabulary,
        objective: Objective,
    ) -> None:
        super().__init__(body, head, vocabulary, objective)
        self.config, self.target_layer_ids = config, config.target_layer_ids
        self.num_drafts = config.num_drafts
        self.first_row = 0 if config.sample_from_anchor else 1

    def layers(self) -> list[nn.Module]:
        return list(self.body.layers)

    def hidden(self, batch: Batch, states: HiddenStates, blocks: Blocks) -> Tensor:
        rows, length = self.config.block_size, batch.input_ids.shape[1]
        assert self.config.mask_token_id is not None
        embeds = self.vocabulary.target.embed(blocks.inputs(rows, self.config.mask_token_id))
        queries = embeds.shape[1]
        shape = MaskShape(len(embeds), queries, length + queries, embeds.device)
        places = blocks.places(rows, length)
        made = {
            kind: make_mask(blocks_after_context(places, kind), shape)
            for kind in dict.fromkeys(self.config.layer_masks())
        }
        masks = [made[kind] for kind in self.config.layer_masks()]
        positions = batch.position_ids, blocks.row_positions(rows)
        run = self.compiled.get("body", self.body)
        out: Tensor = run(embeds, states.aux, positions, masks).unflatten(1, (-1, rows))
        return out


@torch.no_grad()
def right_drafts(
    draft: Draft, batch: Batch, states: HiddenStates, anchors: Tensor, chosen: Tensor
) -> Tensor:
    """[B, N, D] bool: which greedy drafts of the blocks at `anchors` [B, N] are the text's."""
    blocks = blocks_at(batch, anchors, chosen, draft.num_drafts)
    found = draft(batch, states, blocks, torch.zeros((), device=anchors.device))
    right: Tensor = found.right.unflatten(0, anchors.shape)
    return right
