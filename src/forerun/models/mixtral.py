"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Hidden
from forerun.layers.moe import Routing, SparseMoE
from forerun.layers.residual import AddRMSNorm, AuxHiddenStates
from forerun.models.base import DecoderLayer
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.llama import LlamaAttention


class MixtralDecoderLayer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        routing = Routing(
            num_experts=config.need("num_local_experts"),
            top_k=config.need("num_experts_per_tok"),
            norm_topk_prob=True,
            float32_logits=False,
        )
        self.layer_id = layer_id
        self.self_attn = LlamaAttention(config, layer_id, mask, place)
        self.block_sparse_moe = SparseMoE(hidden_size, config.intermediate_size, routing, place)
        self.block_sparse_moe.experts.projections = "w1", "w3", "w2"
        self.input_layernorm = AddRMSNorm(hidden_size, eps, place)
        self.post_attention_layernorm = AddRMSNorm(hidden_size, eps, place)

    def prepare(self) -> None:
        super().prepare()
        self.input_layernorm.link(self.self_attn.qkv_proj)

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
        x = self.block_sparse_moe(x)
        return x, residual


class MixtralForCausalLM(DecoderForCausalLM):
    decoder_layer = MixtralDecoderLayer
