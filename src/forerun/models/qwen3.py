"""Qwen3, dense: RMSNorm on every query and key head, head size of its own."""

from __future__ import annotations

from dataclasses import replace

from forerun.config.model_config import ModelConfig
from forerun.models.decoder import DecoderLM


class Qwen3ForCausalLM(DecoderLM):
    qk_norm = True

    @classmethod
    def adapt(cls, config: ModelConfig) -> ModelConfig:
        return replace(config, mlp_bias=False)
