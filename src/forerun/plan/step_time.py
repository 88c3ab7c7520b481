"""The time of a step: what it reads and computes over the GPU's ceilings, and what comes on top.

The constants are fitted to steps that were measured on one H200, and that of a reduction to one
step on two (docs/performance.md); a test holds the result against these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.plan.gpus import Gpu
from forerun.plan.model_shape import DraftShape, Matrix, ModelShape

# Of the read bandwidth: what kernels reach.
DENSE_READ, EXPERTS_READ = 0.9, 1.0
PACKED_DENSE_READ, PACKED_EXPERTS_READ = 0.68, 0.8  # in fewer bits than the activations
KV_READ, LATENT_READ = 0.7, 0.33
# Seconds of a layer in which memory waits: launches, norms, attention of few tokens.
LAYER, LATENT_LAYER, EXPERTS_LAYER = 3e-6, 9e-6, 11e-6  # the last two come on top
DRAFT_PASS = 0.5e-3  # propose and observe, besides weights and layers
PREFILL_GEMM, PREFILL_EXPERTS = 0.87, 0.29  # of the GEMM rate, attention included
REDUCE = 6.5e-6  # an all-reduce of few tokens, with what dividing a layer costs besides
REDUCE_READ = 0.7  # of the link's bandwidth; an assumption


@dataclass(frozen=True)
class Speculation:
    """Drafts that every decode step verifies."""

    accept_length: float  # tokens that a step commits
    num_tokens: int  # that it verifies, per request
    draft: DraftShape | None = None  # None: drafts cost nothing (n-grams)


@dataclass(frozen=True)
class Deployment:
    """A model on `tp` GPUs, which have whole experts in `ep` groups."""

    model: ModelShape
    gpu: Gpu
    tp: int = 1
    speculation: Speculation | None = None
    ep: int = 1

    @property
    def tokens_per_step(self) -> float:
        """Returns tokens of a request that decodes."""
        return 1.0 if self.speculation is None else self.speculation.accept_length

    def step_seconds(self, batch_size: int, context: int) -> float:
        """Returns seconds of a decode step, at a mean context."""
        width = 1 if self.speculation is None else self.speculation.num_tokens
        model, work = self.model, self.model.work(batch_size, context, width, self.ep)
        read = self.gpu.read_bytes_per_second
        weights = sum(
            gemm.weight_bytes / _reached(matrix)
            for gemm, matrix in zip(work.gemms, model.matrices, strict=True)
        )
        flops, seconds = float(work.flops), self._fixed_seconds(batch_size * width)
        if self.speculation is not None and self.speculation.draft is not None:
            draft = self.speculation.draft
            # Of all ranks: each has the whole draft or its share, and a part of the target's head.
            ranks = draft.ranks_of(self.tp)
            copies = self.tp // ranks
            size = draft.passes * (copies * draft.weight_bytes + self._head_bytes())
            weights += size / DENSE_READ
            flops += batch_size * width * size  # two operations per value of two bytes
            seconds += draft.passes * (DRAFT_PASS + draft.num_layers * LAYER)
            if ranks > 1:
                one = self._reduce_seconds(batch_size * width, draft.hidden_size)
                seconds += draft.passes * 2 * draft.num_layers * one
        gemms = math.hypot(weights / read, flops / self.gpu.flops) / self.tp
        of_bandwidth = LATENT_READ if model.is_latent else KV_READ
        kv = work.kv_bytes / (read * of_bandwidth) / model.kv_shards(self.tp)
        return gemms + kv + seconds

    def prefill_seconds(self, tokens: int) -> float:
        """Returns seconds of one prompt."""
        model = self.model
        flops = sum(matrix.gemm(tokens).flops for matrix in model.matrices)
        attention = len(model.layout.paged) * 2 * model.num_heads * model.head_dim * tokens**2
        ratio = PREFILL_EXPERTS if model.has_experts else PREFILL_GEMM
        computed = (flops + attention) / (self.gpu.flops * ratio * self.tp)
        # Not less than reading the weights once.
        return max(computed + self._layer_reduces(tokens), self.step_seconds(1, tokens))

    def _head_bytes(self) -> int:
        return max(matrix.n * matrix.k * 2 for matrix in self.model.matrices if not matrix.routed)

    def _fixed_seconds(self, tokens: int) -> float:
        model = self.model
        layer = LAYER + LATENT_LAYER * model.is_latent + EXPERTS_LAYER * model.has_experts
        return model.num_layers * layer + self._layer_reduces(tokens)

    def _layer_reduces(self, tokens: int) -> float:
        """Two all-reduces of the target's hidden states per layer."""
        return 2 * self.model.num_layers * self._reduce_seconds(tokens, self.model.hidden_size)

    def _reduce_seconds(self, tokens: int, hidden_size: int) -> float:
        """Returns seconds of an all-reduce of hidden states [tokens, hidden_size] in bfloat16."""
        if self.tp == 1:
            return 0.0
        size = 2 * tokens * hidden_size * 2 * (self.tp - 1) / self.tp
        return REDUCE + size / (self.gpu.link_bytes_per_second * REDUCE_READ)


def _reached(matrix: Matrix) -> float:
    """Part of the read bandwidth with which a weight is read."""
    if matrix.packed:
        return PACKED_EXPERTS_READ if matrix.routed else PACKED_DENSE_READ
    return EXPERTS_READ if matrix.routed else DENSE_READ
