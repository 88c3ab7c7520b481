"""Qwen2 and Qwen2.5 (arXiv 2407.10671): biases on q, k and v; upper layers may have a window."""

from __future__ import annotations

from forerun.config.model_config import ModelConfig
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import PreNormDecoderLayer, SelfAttention


class Qwen2Attention(SelfAttention):
    @classmethod
    def biases(cls, config: ModelConfig) -> tuple[bool, bool]:
        return True, False


class Qwen2DecoderLayer(PreNormDecoderLayer):
    attention = Qwen2Attention


class Qwen2ForCausalLM(DecoderForCausalLM):
    decoder_layer = Qwen2DecoderLayer
