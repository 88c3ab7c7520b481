"""Accept length without a serving loop.

Greedy verification accepts a draft token exactly when the target's own greedy text has it. So one
pass gives the draft's block at every position of that text, and the steps a server would take are a
walk along it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from forerun.train.draft import draft_logits, target_features
from forerun.train.draft_model import Draft
from forerun.train.regen import Samples


@dataclass(frozen=True)
class AcceptScore:
    tokens: int
    steps: int
    offered: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """Generated tokens per verify step, the bonus counted."""
        return self.tokens / self.steps

    @property
    def per_position(self) -> list[float]:
        """Share of steps that accepted draft token j (1-based) and, as served, all before it."""
        return [a / max(o, 1) for a, o in zip(self.accepted, self.offered, strict=True)]


@torch.inference_mode()
def matches(
    draft: Draft, target: Qwen3ForCausalLM, ids: Tensor, prompt: int, end: int, chunk: int = 64
) -> list[int]:
    """How many draft tokens match at each anchor ``prompt … end - 1`` of ``ids`` [length]."""
    features = target_features(target, ids[None, :end], draft.shape.target_layer_ids)
    found: list[int] = []
    ahead = torch.arange(1, draft.shape.block_size, device=ids.device)
    for first in range(prompt, end, chunk):
        anchors = torch.arange(first, min(first + chunk, end), device=ids.device)
        guess = draft_logits(draft, target, ids[None, :end], features, anchors[None])[0].argmax(-1)
        place = anchors[:, None] + ahead
        right = (guess == ids[place.clamp(max=end - 1)]) & (place < end)
        found += right.long().cumprod(-1).sum(-1).tolist()
    return found


def walk(found: list[int], block: int) -> tuple[int, list[int]]:
    """Steps a server takes over a response, and how often each draft row held.

    ``found`` has the matches at each of the response's tokens. The first token comes out of
    prefill; every step then starts at the newest token and adds its matches and a bonus.
    """
    at, steps, held = 0, 0, [0] * (block - 1)
    while at < len(found) - 1:
        steps += 1
        for j in range(found[at]):
            held[j] += 1
        at += found[at] + 1
    return steps, held


def accept_score(draft: Draft, target: Qwen3ForCausalLM, samples: Samples) -> AcceptScore:
    """Accept length over all samples. The token that prefill yields is not counted."""
    device = target.lm_head.weight.device
    block = draft.shape.block_size
    tokens, steps, held = 0, 0, [0] * (block - 1)
    for ids, prompt, end in zip(
        samples.ids, samples.prompt.tolist(), samples.end.tolist(), strict=True
    ):
        found = matches(
            draft, target, torch.from_numpy(ids.astype("int64")).to(device), prompt, end
        )
        taken, rows = walk(found, block)
        tokens += end - prompt - 1
        steps += taken
        held = [a + b for a, b in zip(held, rows, strict=True)]
    return AcceptScore(tokens, max(steps, 1), (steps,) * (block - 1), tuple(held))
