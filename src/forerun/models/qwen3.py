"""Qwen3, dense (arXiv 2505.09388): RMSNorm on every query and key head, head size of its own."""

from __future__ import annotations

from forerun.config.model_config import ModelConfig
from forerun.layers.norm import RMSNorm
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import PreNormDecoderLayer, SelfAttention


class Qwen3Attention(SelfAttention):
    @classmethod
    def qk_norm(cls, config: ModelConfig) -> type[RMSNorm]:
        return RMSNorm


class Qwen3DecoderLayer(PreNormDecoderLayer):
    attention = Qwen3Attention
    self_attn: Qwen3Attention


class Qwen3ForCausalLM(DecoderForCausalLM):
    decoder_layer = Qwen3DecoderLayer
