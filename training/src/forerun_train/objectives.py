"""Objectives of drafts, and how they are computed without logits of all rows in memory.

Losses of a draft's distribution p_d against the label and the target's distribution p_t, mixed:

    CE   -log p_d(label)
    KL   Σ p_t (log p_t - log p_d)
    L1   ‖p_d - p_t‖₁, twice the total variation distance

Draft k of a block (from 0) weighs e^(-k/γ), or what D-PACE gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Mix:
    """Weights of the losses."""

    ce: float = 1.0
    kl: float = 0.0
    l1: float = 0.0

    @property
    def reads_target(self) -> bool:
        """Whether the target's distribution is needed."""
        return self.kl > 0 or self.l1 > 0


@dataclass(frozen=True)
class PositionWeights:
    """How much each draft of a block weighs."""

    decay: float  # γ
    dpace: float = 0.0  # α; 0: the fixed decay

    def fixed(self, valid: Tensor) -> Tensor:
        """e^(-k/γ) of valid [n, D], float32."""
        place = torch.arange(valid.shape[1], device=valid.device)
        return torch.exp(-place / self.decay) * valid

    def of(self, ce: Tensor, valid: Tensor) -> Tensor:
        """Weights [n, D] float32, detached.

        Args:
            ce: [n, D], cross-entropies of the labels.
            valid: [n, D] bool.
        """
        if self.dpace <= 0:
            return self.fixed(valid)
        likely = torch.exp(-ce.detach()) * (1 - self.dpace) + self.dpace
        reached = torch.where(valid, likely, 1.0).cumprod(1) * valid
        return reached.flip(1).cumsum(1).flip(1) * valid


class Distances(NamedTuple):
    """The losses of each row, float32."""

    loss: Tensor  # the mix
    ce: Tensor
    overlap: Tensor  # 1 - ½ L1, detached; 0 where the target is not read


def distances(logits: Tensor, labels: Tensor, target: Tensor | None, mix: Mix) -> Distances:
    """Losses of rows.

    Args:
        logits: [..., V], any dtype.
        labels: [...] int64, columns.
        target: [..., V], the target's logits; None where nothing reads them.
    """
    log_p = F.log_softmax(logits.float(), -1)
    ce = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    loss = mix.ce * ce
    if target is None:
        return Distances(loss, ce, torch.zeros_like(ce))
    log_t = F.log_softmax(target.float(), -1)
    probability = log_t.exp()
    difference = (log_p.exp() - probability).abs().sum(-1)
    if mix.kl > 0:
        loss = loss + mix.kl * (probability * (log_t - log_p)).sum(-1)
    if mix.l1 > 0:
        loss = loss + mix.l1 * difference
    return Distances(loss, ce, 1 - difference.detach() / 2)


Chunk = Mapping[str, Tensor | None]
# (parameters of the head, hidden states [n, R, H], what belongs to these n blocks) -> the sum of
# weighted losses, the sum of weights, and which drafts are right [n, D] bool.
ChunkLoss = Callable[[Mapping[str, Tensor], Tensor, Chunk], tuple[Tensor, Tensor, Tensor]]


class BlockLoss(NamedTuple):
    """The loss of all blocks of a pass."""

    total: Tensor  # the sum of weighted losses, float32; differentiable once
    weight: Tensor  # the sum of weights, float32
    right: Tensor  # [n, D] bool: greedy drafts that equal their labels, and count


def chunked_loss(
    loss: ChunkLoss, head: nn.Module, hidden: Tensor, chunk: Chunk, size: int
) -> BlockLoss:
    """Sums a loss over all blocks, `size` of them at a time.

    Gradients are computed in the same pass, chunk by chunk: so logits of one chunk only are ever
    in memory, and no GEMM runs twice.

    Args:
        head: its parameters get gradients, too.
        hidden: [n, R, H].
        chunk: tensors of n blocks each.
    """
    named = dict(head.named_parameters())
    job = _Job(loss, tuple(named), chunk, size)
    apply: Any = _Chunked.apply
    return BlockLoss(*apply(job, hidden, *named.values()))


@dataclass(frozen=True)
class _Job:
    loss: ChunkLoss
    names: tuple[str, ...]
    chunk: Chunk
    size: int

    def part(self, first: int) -> Chunk:
        """What belongs to the blocks from `first` on."""
        rows = slice(first, first + self.size)
        return {name: None if each is None else each[rows] for name, each in self.chunk.items()}


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, job: _Job, hidden: Tensor, *values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        needed = hidden.requires_grad
        of_head = [torch.zeros_like(v, dtype=torch.float32) for v in values if needed]
        gradients = torch.empty_like(hidden) if needed else hidden
        parts = []
        for first in range(0, len(hidden), job.size):
            rows = slice(first, first + job.size)
            x = hidden[rows].detach().requires_grad_(needed)
            leaves = [v.detach().requires_grad_(needed) for v in values]
            with torch.set_grad_enabled(needed):
                named = dict(zip(job.names, leaves, strict=True))
                total, *more = job.loss(named, x, job.part(first))
            parts.append((total.detach(), *more))
            if needed:
                found = torch.autograd.grad(total, [x, *leaves], allow_unused=True)
                gradients[rows] = found[0]
                for kept, new in zip(of_head, found[1:], strict=True):
                    if new is not None:
                        kept += new
        ctx.save_for_backward(gradients, *of_head)
        ctx.dtypes = [v.dtype for v in values]
        totals, weights, right = zip(*parts, strict=True)
        out = torch.stack(totals).sum(), torch.stack(weights).sum(), torch.cat(right)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, *others: Tensor) -> Any:
        gradients, *of_head = ctx.saved_tensors
        scaled = [(of_total * g).to(kind) for g, kind in zip(of_head, ctx.dtypes, strict=True)]
        return None, (of_total * gradients).to(gradients.dtype), *scaled
