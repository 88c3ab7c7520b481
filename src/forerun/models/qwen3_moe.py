"""Qwen3-MoE (arXiv 2505.09388): Qwen3's attention; layers of experts, some of them dense."""

from __future__ import annotations

from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Hidden
from forerun.layers.mlp import GatedMLP
from forerun.layers.moe import Routing, SparseMoE
from forerun.layers.residual import AddRMSNorm, AuxHiddenStates
from forerun.models.base import DecoderLayer
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.qwen3 import Qwen3Attention


def is_sparse(config: ModelConfig, layer_id: int) -> bool:
    """Whether a layer has experts; the others are dense."""
    raw = config.raw
    step, dense_layers = int(raw.get("decoder_sparse_step") or 1), raw.get("mlp_only_layers") or ()
    return num_experts(config) > 0 and (layer_id + 1) % step == 0 and layer_id not in dense_layers


def num_experts(config: ModelConfig) -> int:
    key = "num_local_experts" if "num_local_experts" in config.raw else "num_experts"
    return config.need(key)


def routing_of(config: ModelConfig) -> Routing:
    """Scores are a softmax over all experts; logits are rounded to the model's dtype before it."""
    return Routing(
        num_experts=num_experts(config),
        top_k=config.need("num_experts_per_tok"),
        norm_topk_prob=bool(config.raw.get("norm_topk_prob", False)),
        float32_logits=False,
    )


def _sparse_moe(config: ModelConfig, place: WeightPlacement) -> SparseMoE:
    width = config.need("moe_intermediate_size")
    return SparseMoE(config.hidden_size, width, routing_of(config), place)


class Qwen3MoeDecoderLayer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_id = layer_id
        self.self_attn = Qwen3Attention(config, layer_id, mask, place)
        self.mlp: GatedMLP | SparseMoE = (
            _sparse_moe(config, place)
            if is_sparse(config, layer_id)
            else GatedMLP(hidden_size, config.intermediate_size, bias=False, place=place)
        )
        self.input_layernorm = AddRMSNorm(hidden_size, eps, place)
        self.post_attention_layernorm = AddRMSNorm(hidden_size, eps, place)

    def prepare(self) -> None:
        super().prepare()
        self.input_layernorm.link(self.self_attn.qkv_proj)
        if isinstance(self.mlp, GatedMLP):
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
        if isinstance(self.mlp, SparseMoE):
            return self.mlp.after_norm(x, residual, self.post_attention_layernorm)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        return x, residual


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    decoder_layer = Qwen3MoeDecoderLayer
