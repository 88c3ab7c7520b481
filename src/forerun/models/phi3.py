"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219): Llama with fused projections.

Part of a head may be rotated (Phi-4-mini), and RoPE is scaled by LongRoPE for long contexts.
"""

from __future__ import annotations

from torch import Tensor

from forerun.attention.base import LayerMask
from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.mlp import GatedMLP
from forerun.layers.rope import rotary_order
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import SelfAttention
from forerun.models.llama import LlamaDecoderLayer


class Phi3Attention(SelfAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        self.qkv_proj.fused = True

    @classmethod
    def rotary_order(cls, config: ModelConfig) -> Tensor:
        return rotary_order(config.rope, config.head_dim)


class Phi3DecoderLayer(LlamaDecoderLayer):
    attention = Phi3Attention

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer_id: int, place: WeightPlacement) -> GatedMLP:
        mlp = super().make_mlp(config, layer_id, place)
        mlp.gate_up_proj.fused = True
        return mlp


class Phi3ForCausalLM(DecoderForCausalLM):
    decoder_layer = Phi3DecoderLayer
    partial_rotary = True
