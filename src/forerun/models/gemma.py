"""Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786), text only.

Norms before and after attention and MLP, with weights stored as w - 1; a scaled embedding; windows
in most layers. Gemma 2 caps its attention scores and logits; Gemma 3 has QK-norm instead, and
another RoPE in layers with a window.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from forerun.attention.base import AttentionContext, AttentionSpec, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.attention import Attention, ProjectedAttention
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Hidden, PendingGemm, QKVLinear, RowLinear, gelu_tanh_and_mul
from forerun.layers.mlp import GatedMLP
from forerun.layers.norm import UnitOffsetRMSNorm
from forerun.layers.residual import AddRMSNorm, AuxHiddenStates
from forerun.models.base import DecoderLayer
from forerun.models.decoder import DecoderForCausalLM, Scales


class GemmaAttention(ProjectedAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVLinear(hidden_size, heads, kv_heads, dim, config.qkv_bias, place)
        qk_norm: tuple[UnitOffsetRMSNorm, UnitOffsetRMSNorm] | None = None
        if config.architecture == "Gemma3ForCausalLM":
            self.q_norm = UnitOffsetRMSNorm(dim, eps, place)
            self.k_norm = UnitOffsetRMSNorm(dim, eps, place)
            qk_norm = self.q_norm, self.k_norm
        self.attn = Attention(layer_id, mask, *self.qkv_proj.sizes, qk_norm)
        scale = config.need("query_pre_attn_scalar") ** -0.5
        self.attn.spec = AttentionSpec(mask, scale, attention_softcap(config))
        self.o_proj = RowLinear(heads * dim, hidden_size, config.o_bias, place)

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        qkv = self.qkv_proj(x)
        return self.o_proj(self.attn(qkv, rope, ctx))


class GemmaDecoderLayer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        size, eps, norm = config.hidden_size, config.rms_norm_eps, UnitOffsetRMSNorm
        self.layer_id = layer_id
        self.self_attn = GemmaAttention(config, layer_id, mask, place)
        self.mlp = GatedMLP(size, config.intermediate_size, False, place, gelu_tanh_and_mul)
        self.input_layernorm = AddRMSNorm(size, eps, place, norm)
        self.post_attention_layernorm = norm(size, eps, place)
        self.pre_feedforward_layernorm = AddRMSNorm(size, eps, place, norm)
        self.post_feedforward_layernorm = norm(size, eps, place)

    def __call__(
        self,
        x: Hidden,
        residual: Tensor | None,
        rope: RopeInput,
        ctx: AttentionContext,
        aux: AuxHiddenStates,
    ) -> tuple[Hidden, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        aux.capture(self.layer_id, residual)
        pending, residual = aux.after_attention(
            self.layer_id, self.self_attn(x, rope, ctx), residual
        )
        x = self.post_attention_layernorm(pending.result())
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x).result()), residual


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
