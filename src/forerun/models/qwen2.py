"""Qwen2 and Qwen2.5: always biases on q, k and v; upper layers may have a sliding window."""

from __future__ import annotations

from dataclasses import replace

from forerun.config.model_config import ModelConfig
from forerun.models.decoder import DecoderLM


class Qwen2ForCausalLM(DecoderLM):
    @classmethod
    def adapt(cls, config: ModelConfig) -> ModelConfig:
        return replace(config, qkv_bias=True, o_bias=False, mlp_bias=False)
