"""GLM-4-0414: norms before and after attention and MLP; half of each head is rotated, in pairs."""

from __future__ import annotations

from torch import Tensor

from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.mlp import GatedMLP
from forerun.layers.rope import rotary_order
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import SandwichNormDecoderLayer, SelfAttention


class Glm4Attention(SelfAttention):
    @classmethod
    def rotary_order(cls, config: ModelConfig) -> Tensor:
        return rotary_order(config.rope, config.head_dim, interleaved=True)


class Glm4DecoderLayer(SandwichNormDecoderLayer):
    attention = Glm4Attention
    stored_names = (
        ("post_attention_layernorm", "post_self_attn_layernorm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    )

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer_id: int, place: WeightPlacement) -> GatedMLP:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=False, place=place)
        mlp.gate_up_proj.fused = True
        return mlp


class Glm4ForCausalLM(DecoderForCausalLM):
    decoder_layer = Glm4DecoderLayer
    partial_rotary = True
