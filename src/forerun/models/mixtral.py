"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.moe import Routing, SparseMoE
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import PreNormDecoderLayer


class MixtralDecoderLayer(PreNormDecoderLayer):
    stored_names = (("mlp", "block_sparse_moe"),)

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer_id: int, place: WeightPlacement) -> SparseMoE:
        routing = Routing(
            num_experts=config.need("num_local_experts"),
            top_k=config.need("num_experts_per_tok"),
            norm_topk_prob=True,
            float32_logits=False,
        )
        moe = SparseMoE(config.hidden_size, config.intermediate_size, routing, place)
        moe.experts.projections = "w1", "w3", "w2"
        return moe


class MixtralForCausalLM(DecoderForCausalLM):
    decoder_layer = MixtralDecoderLayer
