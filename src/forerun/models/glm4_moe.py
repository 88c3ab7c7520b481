"""GLM-4.5 to 4.7 (arXiv 2508.06471): DeepSeek-V3's experts with grouped-query attention.

Half of each head is rotated; QK-norm where the config has it (`use_qk_norm`).
"""

from __future__ import annotations

from torch import Tensor

from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.mlp import GatedMLP
from forerun.layers.moe import SparseMoE
from forerun.layers.norm import RMSNorm
from forerun.layers.rope import rotary_order
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import PreNormDecoderLayer, SelfAttention
from forerun.models.deepseek import dense_or_sparse_mlp


class Glm4MoeAttention(SelfAttention):
    @classmethod
    def qk_norm(cls, config: ModelConfig) -> type[RMSNorm] | None:
        return RMSNorm if config.raw.get("use_qk_norm") else None

    @classmethod
    def rotary_order(cls, config: ModelConfig) -> Tensor:
        return rotary_order(config.rope, config.head_dim)


class Glm4MoeDecoderLayer(PreNormDecoderLayer):
    attention = Glm4MoeAttention

    @classmethod
    def make_mlp(
        cls, config: ModelConfig, layer_id: int, place: WeightPlacement
    ) -> GatedMLP | SparseMoE:
        return dense_or_sparse_mlp(config, layer_id, place)


class Glm4MoeForCausalLM(DecoderForCausalLM):
    decoder_layer = Glm4MoeDecoderLayer
    partial_rotary = True
