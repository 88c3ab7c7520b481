"""The attention layer: one product for q, k and v, norms and rope on q and k together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionContext,
    AttentionSpec,
    LayerMask,
    QKNormRope,
    RopeInput,
)
from forerun.config.model_config import ModelConfig
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms, rotate
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.layers.rope import RopeRows


class HeadNormRope(QKNormRope):
    """Of one layer. In plain PyTorch q and k heads are normed and rotated together."""

    def __init__(self, heads: int, kv_heads: int, dim: int, norms: HeadNorms | None) -> None:
        self.heads, self.dim, self.norms = heads, dim, norms
        self.parts = [heads + kv_heads, kv_heads]  # rotated, and v
        self.halves = [heads, kv_heads]
        self.norm: RMSNorm | None = None
        if norms is not None:
            stacked = torch.cat((norms.q.expand(heads, -1), norms.k.expand(kv_heads, -1)))
            self.norm = RMSNorm.of(stacked, norms.eps)

    def split(self, product: Tensor, rope: RopeInput) -> tuple[Tensor, Tensor, Tensor]:
        qkv = product.view(product.shape[0], -1, self.dim)
        qk, v = qkv.split_with_sizes(self.parts, 1)
        if self.norm is not None:
            qk = self.norm(qk)
        q, k = rotate(qk, rope.cos_sin).split_with_sizes(self.halves, 1)
        return q, k, v


class Attention:
    """Layer `layer` of a model: [q heads | k heads | v heads] come out of one matrix.

    `qk_norm`: RMSNorm over every q and k head before the rope (Qwen3). `inputs`: columns of
    the rows it reads, where that is not the hidden size. `o` is left to the caller, who fuses the
    residual.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        mask: LayerMask,
        qk_norm: bool,
        dtype: torch.dtype,
        device: torch.device,
        inputs: int | None = None,
    ) -> None:
        self.layer, self.hidden = layer, config.hidden_size
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.sizes = [heads * self.dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.spec = AttentionSpec(mask, scale=1 / math.sqrt(self.dim))
        columns = inputs or config.hidden_size
        self.qkv = Linear(columns, sum(self.sizes), dtype, device, config.qkv_bias)
        self.o = Linear(self.sizes[0], config.hidden_size, dtype, device, config.o_bias)
        self.norms: HeadNorms | None = None
        if qk_norm:
            q, k = torch.empty(2, self.dim, dtype=dtype, device=device)
            self.norms = HeadNorms(q, k, config.rms_norm_eps)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it is copied into."""
        qkv = {f"{prefix}{n}_proj": size for n, size in zip("qkv", self.sizes, strict=True)}
        out = self.qkv.slots(qkv) | self.o.slots({f"{prefix}o_proj": self.hidden})
        if self.norms is not None:
            out[f"{prefix}q_norm.weight"] = self.norms.q
            out[f"{prefix}k_norm.weight"] = self.norms.k
        return out

    def prepare(self) -> None:
        self.qkv.pack()
        self.o.pack()
        self.norm_rope = HeadNormRope(self.heads, self.kv_heads, self.dim, self.norms)

    def __call__(self, x: Tensor | DeferredNorm, rows: RopeRows, ctx: AttentionContext) -> Tensor:
        """x [T, inputs] -> what the heads gathered [T, Hq · D], before `o`."""
        qkv = self.qkv(x)
        return ctx.run(self.layer, self.spec, qkv, self.norm_rope, rows).flatten(1)
