"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219): Llama with fused projections.

Part of a head may be rotated (Phi-4-mini), and RoPE is scaled by LongRoPE for long contexts.
"""

from __future__ import annotations

from forerun.attention.base import LayerMask
from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.rope import rotary_order
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.llama import LlamaAttention, LlamaDecoderLayer


class Phi3Attention(LlamaAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        self.qkv_proj.fused = True
        self._rotary_order = rotary_order(config.rope, config.head_dim)

    def prepare(self) -> None:
        self.qkv_proj.reorder_heads(self._rotary_order)
        super().prepare()


class Phi3DecoderLayer(LlamaDecoderLayer):
    attention = Phi3Attention

    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        self.mlp.gate_up_proj.fused = True


class Phi3ForCausalLM(DecoderForCausalLM):
    decoder_layer = Phi3DecoderLayer
    partial_rotary = True
