"""Qwen3, dense (arXiv 2505.09388): RMSNorm on every query and key head, head size of its own."""

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
from forerun.layers.norm import RMSNorm
from forerun.layers.residual import AddRMSNorm, AuxHiddenStates
from forerun.models.base import DecoderLayer
from forerun.models.decoder import DecoderForCausalLM


class Qwen3Attention(ProjectedAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVLinear(hidden_size, heads, kv_heads, dim, config.qkv_bias, place)
        self.q_norm = RMSNorm(dim, eps, place)
        self.k_norm = RMSNorm(dim, eps, place)
        qk_norm = self.q_norm, self.k_norm
        self.attn = Attention(layer_id, mask, *self.qkv_proj.sizes, qk_norm)
        self.o_proj = RowLinear(heads * dim, hidden_size, config.o_bias, place)

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        qkv = self.qkv_proj(x)
        return self.o_proj(self.attn(qkv, rope, ctx))


class Qwen3DecoderLayer(DecoderLayer):
    attention: ClassVar[type[Qwen3Attention]] = Qwen3Attention

    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_id = layer_id
        self.self_attn = self.attention(config, layer_id, mask, place)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size, bias=False, place=place)
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


class Qwen3ForCausalLM(DecoderForCausalLM):
    decoder_layer = Qwen3DecoderLayer
