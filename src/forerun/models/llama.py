"""Llama 2 to 3.3 (arXiv 2307.09288, 2407.21783). RoPE scaling is read from the config."""

from __future__ import annotations

from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.attention import Attention
from forerun.layers.communication import WeightPlacement
from forerun.layers.embedding import LMHead, VocabEmbedding
from forerun.layers.linear import Hidden, PendingGemm, QKVLinear, RowLinear
from forerun.layers.mlp import GatedMLP
from forerun.layers.module import Module
from forerun.layers.residual import AddRMSNorm, AuxHiddenStates, FinalRMSNorm
from forerun.layers.rope import Rope
from forerun.models.base import CausalLM, DecoderLayer


class LlamaAttention(Module):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size = config.hidden_size
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVLinear(hidden_size, heads, kv_heads, dim, config.qkv_bias, place)
        self.attn = Attention(layer_id, mask, heads, kv_heads, dim)
        self.o_proj = RowLinear(heads * dim, hidden_size, config.o_bias, place)

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        qkv = self.qkv_proj(x)
        return self.o_proj(self.attn(qkv, rope, ctx))


class LlamaDecoderLayer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_id = layer_id
        self.self_attn = LlamaAttention(config, layer_id, mask, place)
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
        x = self.self_attn(x, rope, ctx)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        return x, residual


class LlamaModel(Module):
    def __init__(
        self,
        config: ModelConfig,
        masks: tuple[LayerMask, ...],
        place: WeightPlacement,
        max_positions: int,
    ) -> None:
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, place)
        self.layers = [LlamaDecoderLayer(config, i, mask, place) for i, mask in enumerate(masks)]
        self.norm = FinalRMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.rope = Rope(config.rope, config.head_dim, max_positions, place.dtype, place.device)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, ctx: AttentionContext, aux: AuxHiddenStates
    ) -> Tensor:
        x: Hidden = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        rope = self.rope.rows(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rope, ctx, aux)
        hidden_states, residual = self.norm(x, residual)
        aux.capture(len(self.layers), residual)
        return hidden_states


class LlamaForCausalLM(CausalLM):
    decoder_layer = LlamaDecoderLayer

    def __init__(self, config: ModelConfig, place: WeightPlacement, max_positions: int) -> None:
        self.config = config
        self.layer_masks = tuple(LayerMask(Mask.CAUSAL, window) for window in config.windows)
        self.model = LlamaModel(config, self.layer_masks, place, max_positions)
        embed_tokens = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, place, embed_tokens)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        capture_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        aux = AuxHiddenStates(capture_layers)
        hidden_states = self.model(input_ids, positions, ctx, aux)
        return hidden_states, aux.concatenated()
