"""Training the DFlash draft on the target's own responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from forerun_train.toys.accept import Guess
from forerun_train.toys.anchors import Mixture, accept_means, block_labels, target_aux_hidden_states
from forerun_train.toys.draft_model import Draft
from forerun_train.toys.loop import Run, adamw, train
from forerun_train.toys.regen import Samples


@dataclass(frozen=True, kw_only=True)
class DraftRun(Run):
    batch: tuple[int, ...] = (40, 152)
    """Sequences of each pool in a batch: word problems, Python."""
    anchors: int = 16
    gamma: float = 7.0
    dpace: float = 0.0
    """Above 0: D-PACE's alpha; weights positions by the probability of reaching them."""


def block_inputs(ids: Tensor, anchors: Tensor, block: int, mask_token: int) -> Tensor:
    """``[b, n·block]`` token ids: the anchor's token, then mask tokens."""
    b, n = anchors.shape
    blocks = ids.new_full((b, n, block), mask_token)
    blocks[:, :, 0] = ids.gather(1, anchors)
    return blocks.flatten(1)


def draft_logits(
    draft: Draft, target: PreTrainedModel, ids: Tensor, aux_hidden_states: Tensor, anchors: Tensor
) -> Tensor:
    """``[b, n, block - 1, V]`` through the target's embedding and head."""
    s, (b, n) = draft.shape, anchors.shape
    blocks = target.model.embed_tokens(block_inputs(ids, anchors, s.block_size, s.mask_token_id))
    hidden = draft(blocks, aux_hidden_states, anchors).view(b, n, s.block_size, -1)[:, :, 1:]
    logits: Tensor = target.lm_head(hidden)
    return logits


def position_weights(losses: Tensor, inside: Tensor, run: DraftRun) -> Tensor:
    """Weights ``[b, n, block - 1]``, detached.

    Early drafts weigh more, since later ones count only if these are accepted.
    """
    if run.dpace > 0:
        likely = torch.exp(-losses.detach()) * (1 - run.dpace) + run.dpace
        reached = (likely * inside).cumprod(-1)
        return reached.flip(-1).cumsum(-1).flip(-1) * inside
    place = torch.arange(losses.shape[-1], device=losses.device)
    return torch.exp(-place / run.gamma) * inside


def block_guesses(draft: Draft, target: PreTrainedModel) -> Guess:
    """The draft's tokens at anchors of a text."""

    def guess(ids: Tensor, anchors: Tensor) -> Tensor:
        aux_hidden_states = target_aux_hidden_states(target, ids, draft.shape.target_layer_ids)
        return draft_logits(draft, target, ids, aux_hidden_states, anchors)[0].argmax(-1)

    return guess


def train_draft(
    draft: Draft,
    target: PreTrainedModel,
    samples: Sequence[Samples],
    run: DraftRun,
    log: Path,
    save: Callable[[], None],
) -> dict[str, float]:
    """Train in place on responses of the target, which is frozen."""
    device = next(draft.parameters()).device.type
    mixture = Mixture(samples, run.batch, run.anchors, run.seed, device)
    target.requires_grad_(False)

    def loss_of(ids: Tensor, anchors: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            with torch.no_grad():
                aux_hidden_states = target_aux_hidden_states(
                    target, ids, draft.shape.target_layer_ids
                )
            logits = draft_logits(draft, target, ids, aux_hidden_states, anchors)
        labels, inside = block_labels(ids, anchors, end, draft.shape.block_size)
        losses = F.cross_entropy(
            logits.float().flatten(0, 2), labels.flatten(), reduction="none"
        ).view_as(labels)
        w = position_weights(losses, inside, run)
        right = (logits.argmax(-1) == labels) & inside
        return (losses * w).sum() / w.sum(), accept_means(right, run.batch)

    draft.train()
    optimizer = adamw(draft.parameters(), run.lr)
    facts = train(run, optimizer, mixture.next, loss_of, name="draft", log=log, save=save)
    return facts | {"blocks": facts["steps"] * sum(run.batch) * run.anchors}
