"""Accept length without a serving loop.

Greedy verification accepts a draft exactly if it equals the target's greedy token. So one pass over
the target's greedy text gives the drafts at every position, and the verify steps of a server follow
from the number of matches at each position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun_train.toys.regen import Samples

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
        """Tokens per verify step, bonus token included."""
        return self.tokens / self.steps

    @property
    def per_position(self) -> list[float]:
        """Fraction of verify steps that accepted draft j (1-based), and so all before it."""
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
    """Verify steps over a response, and how often each of the ``drafts`` was accepted.

    ``found`` has the matches at each of the response's tokens. The first token comes
    from the prefill; every step then starts at the last token and adds its matches and a bonus.
    """
    at, steps, held = 0, 0, [0] * drafts
    while at < len(found) - 1:
        steps += 1
        for j in range(found[at]):
            held[j] += 1
        at += found[at] + 1
    return steps, held


def accept_score(guess: Guess, drafts: int, samples: Samples, device: torch.device) -> AcceptScore:
    """Accept length over all samples with ``drafts`` drafts a step.

    The token from the prefill is not counted.
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
