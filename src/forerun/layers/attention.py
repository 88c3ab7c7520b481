"""The attention layer: one product for q, k and v, norms and rotation on q and k together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask
from forerun.config.model_config import ModelConfig
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.layers.rope import Rope, RopeRows


class Attention:
    """Layer `layer` of a model: [q heads | k heads | v heads] come out of one matrix.

    `qk_norm`: RMSNorm over every q and k head before the rotation (Qwen3). `o` is left to the
    caller, who fuses the residual.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        mask: LayerMask,
        qk_norm: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layer, self.mask, self.hidden = layer, mask, config.hidden_size
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.parts = [self.heads + self.kv_heads, self.kv_heads]  # rotated, and v
        self.halves = [self.heads, self.kv_heads]
        self.sizes = [heads * self.dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.scale = 1 / math.sqrt(self.dim)
        self.qkv = Linear(config.hidden_size, sum(self.sizes), dtype, device, config.qkv_bias)
        self.o = Linear(self.sizes[0], config.hidden_size, dtype, device, config.o_bias)
        # As loaded, one weight for all q heads and one for all k heads; then stacked, one norm.
        self.head_norms: tuple[RMSNorm, RMSNorm] | None = None
        self.norm: RMSNorm | None = None
        if qk_norm:
            eps = config.rms_norm_eps
            self.head_norms = (
                RMSNorm(self.dim, eps, dtype, device),
                RMSNorm(self.dim, eps, dtype, device),
            )

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it is copied into."""
        qkv = {f"{prefix}{n}_proj": size for n, size in zip("qkv", self.sizes, strict=True)}
        out = self.qkv.slots(qkv) | self.o.slots({f"{prefix}o_proj": self.hidden})
        if self.head_norms is not None:
            for name, norm in zip("qk", self.head_norms, strict=True):
                out[f"{prefix}{name}_norm.weight"] = norm.weight
        return out

    def prepare(self) -> None:
        self.qkv.pack()
        self.o.pack()
        if self.head_norms is not None:
            q, k = (norm.weight for norm in self.head_norms)
            stacked = torch.cat((q.expand(self.heads, -1), k.expand(self.kv_heads, -1)))
            self.norm = RMSNorm.of(stacked, self.head_norms[0].eps)

    def __call__(self, x: Tensor, rope: Rope, rows: RopeRows, ctx: AttentionContext) -> Tensor:
        """x [T, H] -> what the heads gathered [T, Hq · D], before `o`."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)
        qk, v = qkv.split_with_sizes(self.parts, 1)
        if self.norm is not None:
            qk = self.norm(qk)
        q, k = rope.apply(qk, rows).split_with_sizes(self.halves, 1)
        return ctx.run(self.layer, self.mask, self.scale, q, k, v).flatten(1)
