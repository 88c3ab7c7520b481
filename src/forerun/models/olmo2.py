"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after attention and MLP; QK-norm over all heads.

OLMo 3 attends to a window in three of four layers; only the others have scaled RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.communication import Communicator, WeightPlacement
from forerun.layers.linear import Hidden, PendingGemm
from forerun.layers.norm import RMSNorm
from forerun.layers.residual import AuxHiddenStates
from forerun.layers.sharding import Shard
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import BuiltDecoderLayer, SelfAttention


class AllHeadsNorm(RMSNorm):
    """Norms all heads together, of which this rank has some."""

    def __init__(self, columns: Shard, eps: float, place: WeightPlacement) -> None:
        super().__init__(columns.count, eps, place)
        self._columns, self._ranks = columns, place.comm.size

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        return {f"{prefix}weight": self._columns} if self._ranks > 1 else {}


def norm_across(comm: Communicator, *parts: tuple[AllHeadsNorm, Tensor]) -> list[Tensor]:
    """Every part [T, size] normed with the statistics of all ranks, which are summed at once.

    Heads that several ranks have are all as often in the sum, and so do not change the mean.
    """
    if comm.size == 1:
        return [norm(x) for norm, x in parts]
    means = torch.stack([x.float().square().mean(-1) for _, x in parts], -1)
    means = comm.all_reduce(means) / comm.size
    return [
        (x * torch.rsqrt(means[:, i, None] + norm.eps) * norm.weight).to(x.dtype)
        for i, (norm, x) in enumerate(parts)
    ]


class Olmo2Attention(SelfAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        dim, eps, qkv = config.head_dim, config.rms_norm_eps, self.qkv_proj
        self.sizes = tuple(qkv.parts.values())
        self.q_norm: AllHeadsNorm = AllHeadsNorm(qkv.q_heads.scaled(dim), eps, place)
        self.k_norm: AllHeadsNorm = AllHeadsNorm(qkv.kv_heads.scaled(dim), eps, place)
        self._comm = place.comm

    def key_norm(self) -> RMSNorm:
        return self.k_norm

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        q, k, v = self.qkv_proj(x).split_with_sizes(self.sizes, 1)
        qkv = torch.cat((*norm_across(self._comm, (self.q_norm, q), (self.k_norm, k)), v), 1)
        return self.o_proj(self.attn(qkv, rope, ctx))


class Olmo2DecoderLayer(BuiltDecoderLayer):
    attention = Olmo2Attention

    def add_norms(self, size: int, eps: float, place: WeightPlacement) -> None:
        self.post_attention_layernorm = RMSNorm(size, eps, place)
        self.post_feedforward_layernorm = RMSNorm(size, eps, place)

    def __call__(
        self,
        x: Hidden,
        residual: Tensor | None,
        rope: RopeInput,
        ctx: AttentionContext,
        aux: AuxHiddenStates,
    ) -> tuple[Hidden, Tensor]:
        assert isinstance(x, Tensor)  # the norm of the layer before
        residual = x if residual is None else residual + x
        aux.capture(self.layer_id, residual)
        pending, rows = aux.after_attention(
            self.layer_id, self.self_attn(residual, rope, ctx), residual
        )
        residual = rows + self.post_attention_layernorm(pending.result())
        return self.post_feedforward_layernorm(self.mlp(residual).result()), residual


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Olmo2ForCausalLM and Olmo3ForCausalLM: windows and RoPE are in the config."""

    decoder_layer = Olmo2DecoderLayer
