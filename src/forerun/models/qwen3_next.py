"""Qwen3-Next: three of four layers are Gated DeltaNet (arXiv 2412.06464), the fourth attention.

The attention has a gate per output, QK-norm, and RoPE on a quarter of each head. Norms are stored
as w - 1, except the one inside of a DeltaNet layer. Experts have a shared one with a gate.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kernels.cpu.functions import sigmoid
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.communication import WeightPlacement
from forerun.layers.gated_delta_net import DeltaHeads, GatedDeltaNet
from forerun.layers.linear import GatedQKVLinear, PendingGemm
from forerun.layers.mlp import GatedMLP
from forerun.layers.moe import SharedExpertMoE, SparseMoE
from forerun.layers.norm import RMSNorm, UnitOffsetRMSNorm
from forerun.layers.rope import rotary_order
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import PreNormDecoderLayer, SelfAttention, TokenMixer
from forerun.models.qwen3_moe import is_sparse, routing_of


class GatedAttention(SelfAttention):
    qkv_linear = GatedQKVLinear

    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        heads, kv_heads, dim = self.qkv_proj.sizes  # of this rank
        self._widths = (heads + 2 * kv_heads) * dim, heads * dim

    @classmethod
    def qk_norm(cls, config: ModelConfig) -> type[RMSNorm]:
        return UnitOffsetRMSNorm

    @classmethod
    def rotary_order(cls, config: ModelConfig) -> Tensor:
        return rotary_order(config.rope, config.head_dim)

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        qkv, gate = self.qkv_proj(x).split_with_sizes(self._widths, 1)
        return self.o_proj(self.attn(qkv, rope, ctx) * sigmoid(gate))


def is_linear(config: ModelConfig, layer_id: int) -> bool:
    """Whether a layer is Gated DeltaNet. MTP layers, after the last one, have attention."""
    types = config.raw["layer_types"]
    return layer_id < len(types) and types[layer_id] == "linear_attention"


def delta_heads(config: ModelConfig) -> DeltaHeads:
    heads = DeltaHeads(
        num_k=config.need("linear_num_key_heads"),
        num_v=config.need("linear_num_value_heads"),
        k_dim=config.need("linear_key_head_dim"),
        v_dim=config.need("linear_value_head_dim"),
        kernel_size=config.need("linear_conv_kernel_dim"),
    )
    if heads.num_v % heads.num_k:
        raise ConfigError(
            f"linear_num_value_heads {heads.num_v} is not a multiple of linear_num_key_heads"
            f" {heads.num_k}; correct config.json."
        )
    return heads


class HybridDecoderLayer(PreNormDecoderLayer):
    """What Qwen3-Next and Qwen3.5 share; they name and order the projections of DeltaNet layers
    differently.
    """

    attention = GatedAttention
    rms_norm = UnitOffsetRMSNorm

    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        if is_linear(config, layer_id):
            self.stored_names = (("self_attn", "linear_attn"),)

    @classmethod
    def make_attention(
        cls, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> TokenMixer:
        if is_linear(config, layer_id):
            return cls.delta_net(config, layer_id, place)
        return super().make_attention(config, layer_id, mask, place)

    @classmethod
    @abstractmethod
    def delta_net(
        cls, config: ModelConfig, layer_id: int, place: WeightPlacement
    ) -> GatedDeltaNet: ...


class HybridForCausalLM(DecoderForCausalLM):
    rms_norm = UnitOffsetRMSNorm
    partial_rotary = True
    has_recurrent_layers = True


def shared_expert_moe(config: ModelConfig, place: WeightPlacement) -> SharedExpertMoE:
    width = config.need("moe_intermediate_size")
    shared = config.need("shared_expert_intermediate_size")
    return SharedExpertMoE(config.hidden_size, width, shared, routing_of(config), place)


class Qwen3NextDecoderLayer(HybridDecoderLayer):
    @classmethod
    def delta_net(cls, config: ModelConfig, layer_id: int, place: WeightPlacement) -> GatedDeltaNet:
        heads, size, eps = delta_heads(config), config.hidden_size, config.rms_norm_eps
        # By key head, in checkpoints and so on a rank.
        parts = {
            "in_proj_qkvz": heads.conv + heads.value,
            "in_proj_ba": 2 * heads.num_v,
        }
        order = _by_kind(heads.of_rank(place.comm))
        return GatedDeltaNet(layer_id, size, heads, eps, parts, place, order)

    @classmethod
    def make_mlp(
        cls, config: ModelConfig, layer_id: int, place: WeightPlacement
    ) -> GatedMLP | SparseMoE:
        if is_sparse(config, layer_id):
            return shared_expert_moe(config, place)
        return super().make_mlp(config, layer_id, place)


def _by_kind(heads: DeltaHeads) -> Tensor:
    """Where the rows q, k, v, z, b, a are in checkpoints, which have them by key head: [rows]."""
    each = heads.num_v // heads.num_k
    qkvz, ba = (heads.k_dim, heads.k_dim, *[each * heads.v_dim] * 2), (each, each)
    first = torch.arange(heads.conv + heads.value).view(heads.num_k, -1)
    second = torch.arange(2 * heads.num_v).view(heads.num_k, -1) + first.numel()
    kinds = (*first.split_with_sizes(qkvz, 1), *second.split_with_sizes(ba, 1))
    return torch.cat([kind.flatten() for kind in kinds])


class Qwen3NextForCausalLM(HybridForCausalLM):
    decoder_layer = Qwen3NextDecoderLayer
