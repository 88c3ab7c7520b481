"""GLM-4.5 to 4.7 (arXiv 2508.06471): DeepSeek-V3's experts with grouped-query attention.

Half of each head is rotated; QK-norm where the config has it (`use_qk_norm`).
"""

from __future__ import annotations

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
from forerun.layers.rope import rotary_order
from forerun.models.base import DecoderLayer
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.deepseek import dense_or_sparse_mlp


class Glm4MoeAttention(ProjectedAttention):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVLinear(hidden_size, heads, kv_heads, dim, config.qkv_bias, place)
        qk_norm: tuple[RMSNorm, RMSNorm] | None = None
        if config.raw.get("use_qk_norm"):
            self.q_norm, self.k_norm = RMSNorm(dim, eps, place), RMSNorm(dim, eps, place)
            qk_norm = self.q_norm, self.k_norm
        self.attn = Attention(layer_id, mask, *self.qkv_proj.sizes, qk_norm)
        self.o_proj = RowLinear(heads * dim, hidden_size, config.o_bias, place)
        self._qk_norm = qk_norm
        self._rotary_order = rotary_order(config.rope, dim)

    def prepare(self) -> None:
        self.qkv_proj.reorder_heads(self._rotary_order)
        for norm in self._qk_norm or ():
            norm.weight.copy_(norm.weight[self._rotary_order.to(norm.weight.device)])
        super().prepare()

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        qkv = self.qkv_proj(x)
        return self.o_proj(self.attn(qkv, rope, ctx))


class Glm4MoeDecoderLayer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_id = layer_id
        self.self_attn = Glm4MoeAttention(config, layer_id, mask, place)
        self.mlp = dense_or_sparse_mlp(config, layer_id, place)
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
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        return x, residual


class Glm4MoeForCausalLM(DecoderForCausalLM):
    decoder_layer = Glm4MoeDecoderLayer
    partial_rotary = True
