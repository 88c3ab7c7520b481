"""Qwen3-MoE (arXiv 2505.09388): Qwen3's attention; layers of experts, some of them dense."""

from __future__ import annotations

from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.mlp import GatedMLP
from forerun.layers.moe import Routing, SparseMoE
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.qwen3 import Qwen3DecoderLayer


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


class Qwen3MoeDecoderLayer(Qwen3DecoderLayer):
    fuses_router = True

    @classmethod
    def make_mlp(
        cls, config: ModelConfig, layer_id: int, place: WeightPlacement
    ) -> GatedMLP | SparseMoE:
        if not is_sparse(config, layer_id):
            return super().make_mlp(config, layer_id, place)
        width = config.need("moe_intermediate_size")
        return SparseMoE(config.hidden_size, width, routing_of(config), place)


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    decoder_layer = Qwen3MoeDecoderLayer
