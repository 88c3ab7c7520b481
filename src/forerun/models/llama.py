"""Llama 2 to 3.3 (arXiv 2307.09288, 2407.21783), and what differs from it in its config alone.

RoPE scaling, windows (Mistral), biases (Seed-OSS) and layers without RoPE (SmolLM3) are read from
the config.
"""

from __future__ import annotations

from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.mlp import GatedMLP
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import PreNormDecoderLayer


class LlamaDecoderLayer(PreNormDecoderLayer):
    @classmethod
    def make_mlp(cls, config: ModelConfig, layer_id: int, place: WeightPlacement) -> GatedMLP:
        return GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, place)


class LlamaForCausalLM(DecoderForCausalLM):
    decoder_layer = LlamaDecoderLayer
