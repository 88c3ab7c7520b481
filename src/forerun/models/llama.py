"""Llama 2 to 3.3 (arXiv 2307.09288, 2407.21783), and what differs from it in its config alone.

RoPE scaling, windows (Mistral), biases (Seed-OSS) and layers without RoPE (SmolLM3) are read from
the config.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.attention import Attention, ProjectedAttention
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Hidden, PendingGemm, QKVLinear, RowLinear
from forerun.layers.mlp import GatedMLP
from forerun.layers.residual import AddRMSNorm, AuxHiddenStates
from forerun.models.base import DecoderLayer
from forerun.models.decoder import DecoderForCausalLM


class LlamaAttention(ProjectedAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size = config.hidden_size
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVLinear(hidden_size, heads, kv_heads, dim, config.qkv_bias, place)
        self.attn = Attention(layer_id, mask, *self.qkv_proj.sizes)
        self.o_proj = RowLinear(heads * dim, hidden_size, config.o_bias, place)

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        qkv = self.qkv_proj(x)
        return self.o_proj(self.attn(qkv, rope, ctx))


class LlamaDecoderLayer(DecoderLayer):
    attention: ClassVar[type[LlamaAttention]] = LlamaAttention

    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_id = layer_id
        self.self_attn = self.attention(config, layer_id, mask, place)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size, config.mlp_bias, place)
        self.input_layernorm = AddRMSNorm(hidden_size, eps, place)
        self.post_attention_layernorm = AddRMSNorm(hidden_size, eps, place)

    def prepare(self) -> None:
        super().prepare()
        self.input_layernorm.link(self.self_attn.qkv_proj)
        self.post_attention_layernorm.link(self.mlp.gate_up_proj)

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
        x, residual = aux.after_attention(self.layer_id, self.self_attn(x, rope, ctx), residual)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        return x, residual


class LlamaForCausalLM(DecoderForCausalLM):
    decoder_layer = LlamaDecoderLayer
