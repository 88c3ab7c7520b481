"""Granite 3 and 4 dense (arXiv 2404.04324 for the line): Llama with four multipliers."""

from __future__ import annotations

from torch import Tensor

from forerun.attention.base import AttentionSpec, LayerMask
from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Pending
from forerun.models.decoder import DecoderForCausalLM, Scales
from forerun.models.decoder_layer import SelfAttention
from forerun.models.llama import LlamaDecoderLayer


def multiplier(config: ModelConfig, key: str) -> float:
    value = config.raw.get(key)
    return 1.0 if value is None else float(value)


class GraniteAttention(SelfAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        self.attn.spec = AttentionSpec(mask, multiplier(config, "attention_multiplier"))


class GraniteDecoderLayer(LlamaDecoderLayer):
    """What a layer adds to the residual stream is multiplied by `residual_multiplier`."""

    attention = GraniteAttention

    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        self.multiplier = multiplier(config, "residual_multiplier")

    def added(self, output: Pending) -> Tensor:
        return output.result() * self.multiplier


class GraniteForCausalLM(DecoderForCausalLM):
    decoder_layer = GraniteDecoderLayer

    @classmethod
    def scales_of(cls, config: ModelConfig) -> Scales:
        return Scales(
            embedding=multiplier(config, "embedding_multiplier"),
            logits=multiplier(config, "logits_scaling"),
        )
