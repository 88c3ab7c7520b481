"""The training loop of targets: a time or step budget, cosine decay, clipping, a log."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

LOG_EVERY = 250
"""Steps between log lines."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Ends after the steps or the seconds; the learning rate follows whichever ends first."""

    seconds: float = 400.0
    max_steps: int = 200_000
    lr: float = 1.5e-3
    final_lr: float = 0.01
    """Final learning rate as a fraction of ``lr``."""
    warmup: float = 0.04
    """Fraction of the run with warm-up."""
    compile: bool = True
    seed: int = 0

    def rate(self, done: float) -> float:
        """The learning rate after the fraction ``done`` of the run."""
        return self.lr * min(1.0, max(done, 1e-3) / self.warmup) * cosine(done, self.final_lr)


def cosine(done: float, final: float) -> float:
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def train(
    run: Run,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    log: Path,
) -> dict[str, float]:
    """Trains in place; the loss is ``loss_of(*batch())``."""
    step_loss = torch.compile(loss_of) if run.compile else loss_of
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    started, step = 0.0, 0
    shown: list[Tensor] = []
    with log.open("w") as lines:
        while True:
            if step == 5 or (step == 0 and not run.compile):  # compiling is not training time
                started = time.perf_counter()
            spent = time.perf_counter() - started if started else 0.0
            done = max(step / run.max_steps, spent / run.seconds)
            if done >= 1:
                return {"steps": step, "seconds": round(spent, 1)}
            rate = run.rate(done)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = step_loss(*batch())
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            shown.append(loss.detach())
            step += 1
            if step % LOG_EVERY == 0 or step == 20:
                mean = round(torch.stack(shown).mean().item(), 4)
                shown.clear()
                line = {"step": step, "seconds": round(spent, 1), "lr": rate, "loss": mean}
                lines.write(json.dumps(line) + "\n")
                lines.flush()
                print(line, flush=True)


def adamw(weights: Iterable[nn.Parameter], lr: float, decay: float = 0.0) -> torch.optim.AdamW:
    """Weight decay applies to matrices only."""
    weights = list(weights)
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = weights[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)
