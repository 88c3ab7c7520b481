"""Qwen3.5 and 3.6, text only: Qwen3-Next's layers with projections of their own, dense or MoE."""

from __future__ import annotations

from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.gated_delta_net import GatedDeltaNet
from forerun.layers.moe import SharedExpertMoE
from forerun.layers.sharding import Shard
from forerun.models.qwen3_next import (
    HybridDecoderLayer,
    HybridForCausalLM,
    delta_heads,
    shared_expert_moe,
)


class Qwen3_5DecoderLayer(HybridDecoderLayer):
    @classmethod
    def delta_net(cls, config: ModelConfig, layer_id: int, place: WeightPlacement) -> GatedDeltaNet:
        heads = delta_heads(config)
        parts: dict[str, int | Shard] = {
            "in_proj_qkv": heads.conv_shard(place.comm),
            "in_proj_z": heads.value,
            "in_proj_b": heads.num_v,
            "in_proj_a": heads.num_v,
        }
        return GatedDeltaNet(layer_id, config.hidden_size, heads, config.rms_norm_eps, parts, place)


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    @classmethod
    def make_mlp(
        cls, config: ModelConfig, layer_id: int, place: WeightPlacement
    ) -> SharedExpertMoE:
        return shared_expert_moe(config, place)


class Qwen3_5ForCausalLM(HybridForCausalLM):
    decoder_layer = Qwen3_5DecoderLayer


class Qwen3_5MoeForCausalLM(HybridForCausalLM):
    decoder_layer = Qwen3_5MoeDecoderLayer
