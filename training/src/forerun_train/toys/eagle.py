"""Training the EAGLE-3 draft on the target's own responses (arXiv 2503.01840, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ForCausalLM

from forerun_train.toys.accept import Guess
from forerun_train.toys.anchors import Mixture, accept_means, block_labels, target_aux_hidden_states
from forerun_train.toys.eagle_model import Eagle
from forerun_train.toys.generate import causal_layers, normed
from forerun_train.toys.loop import Run, adamw, train
from forerun_train.toys.regen import Samples


@dataclass(frozen=True, kw_only=True)
class EagleRun(Run):
    steps: int = 7
    """Steps of a chain: the first reads aux hidden states of the target, the others the draft's."""
    decay: float = 0.9
    """Loss weight of a step relative to the previous one."""
    batch: tuple[int, ...] = (40, 120)
    """Sequences of each pool in a batch: word problems, Python."""
    anchors: int = 32


def frequent_tokens(samples: Sequence[Samples], vocab: int, count: int) -> Tensor:
    """Ascending ids of the ``count`` tokens most frequent in responses; pools weigh the same.

    Ties go to the lower id.
    """
    share = np.zeros(vocab)
    for pool in samples:
        place = np.arange(pool.ids.shape[1])
        inside = (place >= pool.prompt[:, None]) & (place < pool.end[:, None])
        seen = np.bincount(pool.ids[inside], minlength=vocab)
        share += seen / seen.sum()
    chosen = np.argsort(-share, kind="stable")[:count]
    return torch.from_numpy(np.sort(chosen).astype(np.int64))


def start_from_target(draft: Eagle, target: Qwen3ForCausalLM) -> None:
    """Initialises the LM head (of the draft vocabulary) and the final norm from the target."""
    with torch.no_grad():
        draft.lm_head.weight.copy_(target.lm_head.weight[draft.ids])
        draft.norm.weight.copy_(target.model.norm.weight)


def chain_guesses(draft: Eagle, target: Qwen3ForCausalLM, steps: int) -> Guess:
    """Chains of ``steps`` drafts after anchors of a text.

    Every step reads the text's token instead of the draft's: up to the first mismatch, where
    counting ends, they are the same.
    """

    def guess(ids: Tensor, anchors: Tensor) -> Tensor:
        aux_hidden_states = target_aux_hidden_states(target, ids, draft.shape.target_layer_ids)
        chain = draft(target.model.embed_tokens(ids), aux_hidden_states, anchors, steps)
        columns = torch.stack([draft.lm_head(row)[0].argmax(-1) for row in chain], dim=-1)
        return draft.ids[columns]

    return guess


def known_run(labels: Tensor, inside: Tensor, known: Tensor) -> Tensor:
    """Mask of each chain's steps before the first label outside the draft vocabulary."""
    return (inside & known[labels]).long().cumprod(-1).bool()


def train_eagle(
    draft: Eagle,
    target: Qwen3ForCausalLM,
    samples: Sequence[Samples],
    run: EagleRun,
    log: Path,
    save: Callable[[], None],
) -> dict[str, float]:
    """Trains in place: cross-entropy with the target's distribution over the draft vocabulary.

    The target is frozen.
    """
    device = next(draft.parameters()).device.type
    mixture = Mixture(samples, run.batch, run.anchors, run.seed, device)
    target.requires_grad_(False)
    head = target.lm_head.weight[draft.ids].detach()

    def loss_of(ids: Tensor, anchors: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        labels, inside = block_labels(ids, anchors, end, run.steps + 1)
        counted = known_run(labels, inside, draft.t2d)
        losses, right = [], []
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            with torch.no_grad():
                outputs = list(causal_layers(target, ids))
                aux_hidden_states = torch.cat(
                    [outputs[i] for i in draft.shape.target_layer_ids], -1
                )
                last = normed(target, outputs[-1])
            embedded = target.model.embed_tokens(ids)
            for j, row in enumerate(draft(embedded, aux_hidden_states, anchors, run.steps)):
                place = (anchors + j).clamp(max=ids.shape[1] - 1)
                with torch.no_grad():
                    wanted = F.linear(_at(last, place), head).float().softmax(-1)
                logits = draft.lm_head(row).float()
                losses.append(-(wanted * logits.log_softmax(-1)).sum(-1))
                right.append(draft.ids[logits.argmax(-1)] == labels[..., j])
        weights = run.decay ** torch.arange(run.steps, device=ids.device) * counted
        loss = (torch.stack(losses, -1) * weights).sum() / weights.sum()
        return loss, accept_means(torch.stack(right, -1) & inside, run.batch)

    draft.train()
    optimizer = adamw(draft.parameters(), run.lr)
    facts = train(run, optimizer, mixture.next, loss_of, name="eagle3", log=log, save=save)
    return facts | {"chains": facts["steps"] * sum(run.batch) * run.anchors}


def _at(x: Tensor, place: Tensor) -> Tensor:
    """Rows of x [b, s, H] at ``place`` [b, n]."""
    return x.gather(1, place[..., None].expand(*place.shape, x.shape[-1]))
