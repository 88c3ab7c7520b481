"""Optimizers of a run, the learning rate over it, and clipping that waits for nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forerun_train.trainer.options import TrainOptions

BETAS = (0.9, 0.95)


class Optimizers:
    """AdamW for all parameters; or Muon for matrices of layers, and AdamW for the rest.

    Masters are the parameters themselves, in float32.
    """

    def __init__(self, model: nn.Module, options: TrainOptions) -> None:
        self._options = options
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        muon = [
            p
            for name, p in self.parameters.items()
            if options.optimizer == "muon" and p.ndim == 2 and name.startswith("body.")
        ]
        chosen = {id(p) for p in muon}
        rest = [p for p in self.parameters.values() if id(p) not in chosen]
        decay = options.weight_decay
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        fused = rest[0].device.type == "cuda"
        adamw = torch.optim.AdamW(groups, lr=options.learning_rate, betas=BETAS, fused=fused)
        self.all: list[torch.optim.Optimizer] = [adamw]
        if muon:
            self.all.append(
                torch.optim.Muon(
                    muon,
                    lr=options.learning_rate,
                    weight_decay=decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def rate(self, done: float) -> float:
        """The learning rate after a part of the run: linear warm-up, then a cosine."""
        options = self._options
        if done < options.warmup:
            return options.learning_rate * max(done, 1e-4) / options.warmup
        left = (1 - min(done, 1.0)) / max(1 - options.warmup, 1e-9)
        final = options.final_learning_rate
        height = 0.5 * (1 - math.cos(math.pi * left))
        return options.learning_rate * (final + (1 - final) * height)

    def step(self, done: float, scale: Tensor) -> Tensor:
        """One update with gradients times `scale` (0-dim, on the device), clipped.

        Returns the gradient's norm before clipping, on the device.
        """
        rate = self.rate(done)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = _whole(torch.nn.utils.get_total_norm(gradients)) * scale
        limit = self._options.clip
        factor = scale * (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else scale
        _scale(gradients, factor)
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    torch._foreach_mul_(local, factor)
