"""Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786), text only.

Norms before and after attention and MLP, with weights stored as w - 1; a scaled embedding; windows
in most layers. Gemma 2 caps its attention scores and logits; Gemma 3 has QK-norm instead, and
another RoPE in layers with a window.
"""

from __future__ import annotations

import math
from typing import ClassVar

from forerun.attention.base import AttentionSpec, LayerMask
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import gelu_tanh_and_mul
from forerun.layers.mlp import GatedMLP
from forerun.layers.norm import RMSNorm, UnitOffsetRMSNorm
from forerun.models.decoder import DecoderForCausalLM, Scales
from forerun.models.decoder_layer import SandwichNormDecoderLayer, SelfAttention


class GemmaAttention(SelfAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        scale = config.need("query_pre_attn_scalar") ** -0.5
        self.attn.spec = AttentionSpec(mask, scale, attention_softcap(config))

    @classmethod
    def qk_norm(cls, config: ModelConfig) -> type[RMSNorm] | None:
        return UnitOffsetRMSNorm if config.architecture == "Gemma3ForCausalLM" else None


class GemmaDecoderLayer(SandwichNormDecoderLayer):
    attention = GemmaAttention
    rms_norm = UnitOffsetRMSNorm

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer_id: int, place: WeightPlacement) -> GatedMLP:
        size, width = config.hidden_size, config.intermediate_size
        return GatedMLP(size, width, False, place, gelu_tanh_and_mul)


class GemmaForCausalLM(DecoderForCausalLM):
    """Gemma2ForCausalLM and Gemma3ForCausalLM."""

    decoder_layer = GemmaDecoderLayer
    rms_norm = UnitOffsetRMSNorm
    activations: ClassVar = ("gelu_pytorch_tanh",)

    def __init__(self, config: ModelConfig, place: WeightPlacement, max_positions: int) -> None:
        if config.raw.get("use_bidirectional_attention"):
            raise ConfigError(
                "use_bidirectional_attention is not supported: attention of a causal LM is causal."
            )
        self.has_logit_softcap = attention_softcap(config) is not None
        super().__init__(config, place, max_positions)

    @classmethod
    def scales_of(cls, config: ModelConfig) -> Scales:
        cap = config.raw.get("final_logit_softcapping")
        return Scales(
            embedding=math.sqrt(config.hidden_size),
            logit_softcap=None if cap is None else float(cap),
        )


def attention_softcap(config: ModelConfig) -> float | None:
    """Gemma 3 does not have it, though its configs have the key."""
    cap = config.raw.get("attn_logit_softcapping")
    gemma2 = config.architecture == "Gemma2ForCausalLM"
    return float(cap) if gemma2 and cap is not None else None
