"""Gemma 4, text only: transformers' `Gemma4ForCausalLM`, dense and as a mixture of experts.

Norms before and after attention and MLP, as in Gemma 3, with plain weights. Layers with full
attention have heads of another size than those with a window, and RoPE over the first pairs of dims
only. Value heads are normed too, and may come from the projection of the keys. Scores are not
scaled. A layer's output is multiplied by a number of its own.

The mixture of experts (26B-A4B) computes experts beside the MLP of every layer. The small models
(E2B, E4B) add to every layer's output an embedding of the token for this layer, and their last
layers read the K/V of earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, AttentionSpec, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.config.rope_config import PROPORTIONAL
from forerun.core.errors import ConfigError
from forerun.kernels.cpu.functions import gelu_tanh
from forerun.kernels.elementwise.value_norm import norm_values
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.kernels.moe.experts import GELU_TANH, combine
from forerun.kernels.moe.routing import Routed, Routing
from forerun.layers.attention import Attention, SharedAttention
from forerun.layers.communication import WeightPlacement
from forerun.layers.embedding import VocabEmbedding
from forerun.layers.linear import (
    ColumnLinear,
    Hidden,
    Linear,
    LinearBase,
    PendingGemm,
    QKVLinear,
    RowLinear,
    SharedKVLinear,
    gelu_tanh_and_mul,
)
from forerun.layers.mlp import GatedMLP
from forerun.layers.module import Module
from forerun.layers.moe import Experts, Router, by_blocks
from forerun.layers.norm import RMSNorm
from forerun.layers.residual import AuxHiddenStates
from forerun.layers.sharding import Shard, even_shard
from forerun.models.decoder import DecoderForCausalLM, DecoderModel, Scales
from forerun.models.decoder_layer import SandwichNormDecoderLayer

SCALE = 1.0  # of attention scores


def first_shared_layer(config: ModelConfig) -> int:
    """The first of the layers that read the K/V of earlier ones."""
    return config.num_layers - int(config.raw.get("num_kv_shared_layers") or 0)


def kv_sources(config: ModelConfig) -> dict[str, int]:
    """The last layer of every type that has K/V of its own."""
    types = config.raw["layer_types"]
    return {types[i]: i for i in range(max(first_shared_layer(config), 0))}


def kv_source(config: ModelConfig, layer_id: int) -> int | None:
    """The layer whose K/V this one reads: the last of its type that has some; None: its own.

    Raises:
        ConfigError: no layer of its type has K/V.
    """
    if layer_id < first_shared_layer(config):
        return None
    sources, kind = kv_sources(config), config.raw["layer_types"][layer_id]
    if kind not in sources:
        raise ConfigError(
            f"num_kv_shared_layers {config.raw['num_kv_shared_layers']}: layer {layer_id} shares"
            f" K/V, and no {kind} layer before has some; correct config.json."
        )
    return sources[kind]


class Gemma4Attention(Module):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        size, heads, eps = config.hidden_size, config.num_heads, config.rms_norm_eps
        kv_heads, dim = config.layer_kv_heads[layer_id], config.layer_head_dims[layer_id]
        full = config.raw["layer_types"][layer_id] == "full_attention"
        kind = SharedKVLinear if full and config.raw.get("attention_k_eq_v") else QKVLinear
        self.qkv_proj = kind(size, heads, kv_heads, dim, config.qkv_bias, place)
        self.q_norm, self.k_norm = RMSNorm(dim, eps, place), RMSNorm(dim, eps, place)
        self.attn = Attention(layer_id, mask, *self.qkv_proj.sizes, (self.q_norm, self.k_norm))
        self.attn.spec = AttentionSpec(mask, SCALE)
        self.o_proj = RowLinear(heads * dim, size, config.o_bias, place)
        self._values = self.qkv_proj.num_kv_heads, dim, eps

    @property
    def input_proj(self) -> LinearBase:
        return self.qkv_proj

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        qkv = self.qkv_proj(x)
        norm_values(qkv, *self._values)
        return self.o_proj(self.attn(qkv, rope, ctx))


class Gemma4SharedAttention(Module):
    """Attention of a layer without K/V of its own."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        mask: LayerMask,
        place: WeightPlacement,
        source: int,
    ) -> None:
        """`source`: the layer whose K/V it reads."""
        dim = config.layer_head_dims[layer_id]
        size, width = config.hidden_size, config.num_heads * dim
        heads = even_shard(config.num_heads, place.comm, "attention heads")
        self.q_proj = ColumnLinear(size, heads.scaled(dim), config.qkv_bias, place)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, place)
        spec = AttentionSpec(mask, SCALE)
        self.attn = SharedAttention(layer_id, source, spec, dim, self.q_norm)
        self.o_proj = RowLinear(width, size, config.o_bias, place)

    def read_from(self, layer: int, mask: LayerMask) -> None:
        """Reads the K/V of a layer of another model's pools, with this mask."""
        self.attn.layer_id, self.attn.spec = layer, AttentionSpec(mask, SCALE)

    @property
    def input_proj(self) -> LinearBase:
        return self.q_proj

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        return self.o_proj(self.attn(self.q_proj(x), rope, ctx))


class Gemma4Router(Router):
    """`proj.weight`, `scale` [H] of the router's own norm, and `per_expert_scale` [E]."""

    def __init__(self, config: ModelConfig, routing: Routing, place: WeightPlacement) -> None:
        super().__init__(config.hidden_size, routing, place)
        self.per_expert_scale = place.empty(routing.num_experts)
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return {
            f"{prefix}proj.weight": self.weight,
            f"{prefix}scale": self._norm.weight,
            f"{prefix}per_expert_scale": self.per_expert_scale,
        }

    def prepare(self) -> None:
        super().prepare()
        self._norm.weight = self._norm.weight * self.weight.shape[1] ** -0.5
        self._norm.prepare()
        self.per_expert_scale = self.per_expert_scale.float()

    def __call__(self, x: Tensor) -> Routed:
        """x [T, H], not normed -> experts and weights of T tokens."""
        routed = super().__call__(self._norm(x))
        scales = self.per_expert_scale.index_select(0, routed.experts.flatten())
        return replace(routed, weights=routed.weights * scales.view_as(routed.weights))


class Gemma4Experts(Experts):
    activation = GELU_TANH


class Gemma4DecoderLayer(SandwichNormDecoderLayer):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_scalar = place.empty(1)
        self._per_layer = per_layer_size(config)
        if self._per_layer:
            self.per_layer_input_gate = Linear(size, self._per_layer, False, place)
            self.per_layer_projection = Linear(self._per_layer, size, False, place)
            self.post_per_layer_input_norm = RMSNorm(size, eps, place)
        self.moe = Gemma4MoE(config, place) if config.raw.get("enable_moe_block") else None

    @classmethod
    def make_attention(
        cls, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> Gemma4Attention | Gemma4SharedAttention:
        source = kv_source(config, layer_id)
        if source is None:
            return Gemma4Attention(config, layer_id, mask, place)
        return Gemma4SharedAttention(config, layer_id, mask, place, source)

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer_id: int, place: WeightPlacement) -> GatedMLP:
        shared = layer_id >= first_shared_layer(config)
        wide = 2 if shared and config.raw.get("use_double_wide_mlp") else 1
        width = wide * config.intermediate_size
        return GatedMLP(config.hidden_size, width, False, place, gelu_tanh_and_mul)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """Names the parts of `moe` as checkpoints do: they are the layer's."""
        own = {n.replace(f"{prefix}moe.", prefix): v for n, v in super().weights(prefix).items()}
        return own | {f"{prefix}layer_scalar": self.layer_scalar}

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        return {n.replace(f"{prefix}moe.", prefix): s for n, s in super().shards(prefix).items()}

    def __call__(
        self,
        x: Hidden,
        residual: Tensor | None,
        rope: RopeInput,
        ctx: AttentionContext,
        aux: AuxHiddenStates,
        per_layer_input: Tensor | None = None,
    ) -> tuple[Hidden, None]:
        """`per_layer_input` [T, P]: the tokens' embeddings for this layer, where it has some."""
        x, residual = self.input_layernorm(x, residual)
        aux.capture(self.layer_id, residual)
        pending = self.self_attn(x, rope, ctx)
        if per_layer_input is None:
            pending, residual = aux.after_attention(self.layer_id, pending, residual)
        x = self.post_attention_layernorm(pending.result())
        x, residual = self.pre_feedforward_layernorm(x, residual)
        out = self.mlp(x).result()
        if self.moe is not None:
            out = self.moe(out, residual)
        total = residual + self.post_feedforward_layernorm(out)
        if per_layer_input is not None:
            total = total + self._of_input(total, per_layer_input)
        return total * self.layer_scalar, None

    def _of_input(self, x: Tensor, per_layer_input: Tensor) -> Tensor:
        """x [T, H], per_layer_input [T, P] -> [T, H]."""
        gate = gelu_tanh(self.per_layer_input_gate(x))
        return self.post_per_layer_input_norm(self.per_layer_projection(gate * per_layer_input))


class Gemma4MoE(Module):
    """Experts beside the MLP of a layer, from the same residual stream, each with its norms."""

    def __init__(self, config: ModelConfig, place: WeightPlacement) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        experts, width = config.need("num_experts"), config.need("moe_intermediate_size")
        routing = Routing(
            num_experts=experts,
            top_k=config.need("top_k_experts"),
            norm_topk_prob=True,
            float32_logits=False,
        )
        self.router = Gemma4Router(config, routing, place)
        self.experts = Gemma4Experts(experts, size, width, place)
        self.post_feedforward_layernorm_1 = RMSNorm(size, eps, place)
        self.pre_feedforward_layernorm_2 = RMSNorm(size, eps, place)
        self.post_feedforward_layernorm_2 = RMSNorm(size, eps, place)
        self._comm = place.comm

    def __call__(self, dense: Tensor, residual: Tensor) -> Tensor:
        """The MLP's output and its residual [T, H] -> [T, H], before the norm after both."""
        x = self.pre_feedforward_layernorm_2(residual)
        partials = by_blocks(
            self.experts, len(x), lambda rows: self.experts(x[rows], self.router(residual[rows]))
        )
        sparse = self._comm.all_reduce(combine(partials, x.dtype))
        dense = self.post_feedforward_layernorm_1(dense)
        return dense + self.post_feedforward_layernorm_2(sparse)


def per_layer_size(config: ModelConfig) -> int:
    """P, the size of a token's embedding for one layer; 0: there are none."""
    return int(config.raw.get("hidden_size_per_layer_input") or 0)


class Gemma4Model(DecoderModel):
    """A decoder with embeddings of every token for every layer, where the config has them."""

    def __init__(
        self,
        config: ModelConfig,
        family: DecoderForCausalLM,
        place: WeightPlacement,
        max_positions: int,
    ) -> None:
        super().__init__(config, family, place, max_positions)
        self._per_layer = per_layer_size(config)
        if self._per_layer:
            vocab = int(config.raw.get("vocab_size_per_layer_input") or config.vocab_size)
            size, hidden = config.num_layers * self._per_layer, config.hidden_size
            scale = math.sqrt(self._per_layer)
            self.embed_tokens_per_layer = VocabEmbedding(vocab, size, place, scale)
            self.per_layer_model_projection = Linear(hidden, size, False, place)
            self.per_layer_projection_norm = RMSNorm(self._per_layer, config.rms_norm_eps, place)
            self._projection_scale = hidden**-0.5

    def __call__(
        self, input_ids: Tensor, positions: Tensor, ctx: AttentionContext, aux: AuxHiddenStates
    ) -> Tensor:
        if not self._per_layer:
            return super().__call__(input_ids, positions, ctx, aux)
        embedded = self.embed_tokens(input_ids)
        inputs = self._per_layer_inputs(input_ids, embedded)
        x: Hidden = embedded
        residual: Tensor | None = None
        for layer, rope, own in zip(self.layers, self.ropes.rows(positions), inputs, strict=True):
            assert isinstance(layer, Gemma4DecoderLayer)
            x, residual = layer(x, residual, rope, ctx, aux, own)
        hidden_states, residual = self.norm(x, residual)
        aux.capture(len(self.layers), residual)
        return hidden_states

    def _per_layer_inputs(self, input_ids: Tensor, embedded: Tensor) -> Sequence[Tensor]:
        """Those of every layer, [T, P]: of the token's id, and projected from its embedding."""
        projected = self.per_layer_model_projection(embedded) * self._projection_scale
        normed = self.per_layer_projection_norm(projected.view(-1, self._per_layer))
        both = normed.view_as(projected) + self.embed_tokens_per_layer(input_ids)
        return torch.split(both * math.sqrt(0.5), self._per_layer, 1)


class Gemma4ForCausalLM(DecoderForCausalLM):
    decoder_layer = Gemma4DecoderLayer
    decoder = Gemma4Model
    activations: ClassVar = ("gelu_pytorch_tanh",)
    partial_rotary = True

    def __init__(self, config: ModelConfig, place: WeightPlacement, max_positions: int) -> None:
        if config.raw.get("use_bidirectional_attention") == "all":
            raise ConfigError(
                "use_bidirectional_attention all is not supported: attention of a causal LM is"
                " causal."
            )
        for rope in config.layer_ropes:
            if rope.partial_rotary_factor != 1 and rope.scaling != PROPORTIONAL:
                raise ConfigError(
                    f"partial_rotary_factor {rope.partial_rotary_factor} of Gemma 4 goes with"
                    f" rope_type {PROPORTIONAL}, not {rope.scaling}; correct config.json."
                )
        ids = int(config.raw.get("vocab_size_per_layer_input") or config.vocab_size)
        if per_layer_size(config) and ids < config.vocab_size:
            raise ConfigError(
                f"vocab_size_per_layer_input {ids} is below vocab_size {config.vocab_size}:"
                " tokens beyond it have no embedding per layer. Is config.json complete?"
            )
        super().__init__(config, place, max_positions)

    @classmethod
    def scales_of(cls, config: ModelConfig) -> Scales:
        cap = config.raw.get("final_logit_softcapping")
        return Scales(
            embedding=math.sqrt(config.hidden_size),
            logit_softcap=None if cap is None else float(cap),
        )
