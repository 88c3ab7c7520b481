"""Accept length without a serving loop.

Greedy verification accepts a draft token exactly when the target's own greedy text has it. So one
pass gives the drafts at every position of that text, and the steps a server would take are a walk
along it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun_train.regen import Samples

Guess = Callable[[Tensor, Tensor], Tensor]
"""``ids`` [1, s], ``anchors`` [1, n] -> the drafts after every anchor, [n, K]."""


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
def matches(guess: Guess, ids: Tensor, prompt: int, end: int, chunk: int = 256) -> list[int]:
    """How many draft tokens match at each anchor ``prompt … end - 1`` of ``ids`` [length]."""
    found: list[int] = []
    for first in range(prompt, end, chunk):
        anchors = torch.arange(first, min(first + chunk, end), device=ids.device)
        guessed = guess(ids[None, :end], anchors[None])
        ahead = torch.arange(1, guessed.shape[1] + 1, device=ids.device)
        place = anchors[:, None] + ahead
        right = (guessed == ids[place.clamp(max=end - 1)]) & (place < end)
        found += right.long().cumprod(-1).sum(-1).tolist()
    return found


def walk(found: list[int], drafts: int) -> tuple[int, list[int]]:
    """Steps a server takes over a response, and how often each of the ``drafts`` held.

    ``found`` has the matches at each of the response's tokens. The first token comes out of
    prefill; every step then starts at the newest token and adds its matches and a bonus.
    """
    at, steps, held = 0, 0, [0] * drafts
    while at < len(found) - 1:
        steps += 1
        for j in range(found[at]):
            held[j] += 1
        at += found[at] + 1
    return steps, held


def accept_score(guess: Guess, drafts: int, samples: Samples, device: torch.device) -> AcceptScore:
    """Accept length over all samples, at so many drafts a step.

    The token that prefill yields is not counted.
    """
    tokens, steps, held = 0, 0, [0] * drafts
    for ids, prompt, end in zip(
        samples.ids, samples.prompt.tolist(), samples.end.tolist(), strict=True
    ):
        text = torch.from_numpy(ids.astype("int64")).to(device)
        taken, rows = walk(matches(guess, text, prompt, end), drafts)
        tokens += end - prompt - 1
        steps += taken
        held = [a + b for a, b in zip(held, rows, strict=True)]
    return AcceptScore(tokens, max(steps, 1), (steps,) * drafts, tuple(held))
