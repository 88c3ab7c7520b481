"""GLM-4-0414: norms before and after attention and MLP; half of each head is rotated, in pairs."""

from __future__ import annotations

from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Hidden
from forerun.layers.mlp import GatedMLP
from forerun.layers.norm import RMSNorm
from forerun.layers.residual import AddRMSNorm, AuxHiddenStates
from forerun.layers.rope import rotary_order
from forerun.models.base import DecoderLayer
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.llama import LlamaAttention


class Glm4Attention(LlamaAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        self._rotary_order = rotary_order(config.rope, config.head_dim, interleaved=True)

    def prepare(self) -> None:
        self.qkv_proj.reorder_heads(self._rotary_order)
        super().prepare()


class Glm4DecoderLayer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_id = layer_id
        self.self_attn = Glm4Attention(config, layer_id, mask, place)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size, bias=False, place=place)
        self.mlp.gate_up_proj.fused = True
        self.input_layernorm = AddRMSNorm(hidden_size, eps, place)
        self.post_self_attn_layernorm = RMSNorm(hidden_size, eps, place)
        self.post_attention_layernorm = AddRMSNorm(hidden_size, eps, place)
        self.post_mlp_layernorm = RMSNorm(hidden_size, eps, place)

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
        x = self.post_self_attn_layernorm(pending.result())
        x, residual = self.post_attention_layernorm(x, residual)
        return self.post_mlp_layernorm(self.mlp(x).result()), residual


class Glm4ForCausalLM(DecoderForCausalLM):
    decoder_layer = Glm4DecoderLayer
    partial_rotary = True
