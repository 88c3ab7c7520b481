"""The decoder layers that families share; a family says how its own differ.

A layer is built by hooks: `attention` (a class), `make_attention` and `make_mlp`. Attention too:
biases, QK-norm and the order of rotated dims are methods that a family overrides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Protocol

from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.attention import Attention, ProjectedAttention
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Hidden, LinearBase, Pending, PendingGemm, QKVLinear, RowLinear
from forerun.layers.mlp import GatedMLP
from forerun.layers.moe import SparseMoE
from forerun.layers.norm import RMSNorm
from forerun.layers.residual import AddRMSNorm, AuxHiddenStates
from forerun.layers.sharding import Shard
from forerun.models.base import DecoderLayer


class TokenMixer(Protocol):
    """What mixes tokens in a layer: attention or a recurrence, with its projections."""

    @property
    def input_proj(self) -> LinearBase:
        """The one linear that reads the layer's first norm."""

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        """x [T, H], normed -> [T, H], a GEMM that has not run."""


class SelfAttention(ProjectedAttention):
    """Grouped-query attention between two projections."""

    qkv_linear: ClassVar[type[QKVLinear]] = QKVLinear
    q_norm: RMSNorm  # where `qk_norm` gives a kind
    k_norm: RMSNorm

    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        size, eps, norm = self.input_size(config), config.rms_norm_eps, self.qk_norm(config)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv_bias, o_bias = self.biases(config)
        self.qkv_proj = self.qkv_linear(size, heads, kv_heads, dim, qkv_bias, place)
        norms: tuple[RMSNorm, RMSNorm] | None = None
        if norm is not None:
            self.q_norm, self.k_norm = norms = norm(dim, eps, place), norm(dim, eps, place)
        self.attn = Attention(layer_id, mask, *self.qkv_proj.sizes, norms)
        self.o_proj = RowLinear(heads * dim, config.hidden_size, o_bias, place)
        self._rotary_order, self._qk_norms = self.rotary_order(config), norms or ()

    @classmethod
    def input_size(cls, config: ModelConfig) -> int:
        """Returns the size of what `qkv_proj` reads."""
        return config.hidden_size

    @classmethod
    def biases(cls, config: ModelConfig) -> tuple[bool, bool]:
        """Returns whether `qkv_proj` and `o_proj` have a bias."""
        return config.qkv_bias, config.o_bias

    @classmethod
    def qk_norm(cls, config: ModelConfig) -> type[RMSNorm] | None:
        """Returns the norm over every query and key head before RoPE."""
        return None

    @classmethod
    def rotary_order(cls, config: ModelConfig) -> Tensor | None:
        """Returns the order [D] that puts rotated dims first, as `layers.rope.rotary_order`."""
        return None

    @property
    def input_proj(self) -> LinearBase:
        return self.qkv_proj

    def prepare(self) -> None:
        if self._rotary_order is not None:
            self.reorder(self._rotary_order)
        super().prepare()

    def reorder(self, order: Tensor) -> None:
        """Reorders the dims of every q and k head by `order` [D] (`rotary_order`)."""
        self.qkv_proj.reorder_heads(order)
        for norm in self._qk_norms:
            norm.weight.copy_(norm.weight[order.to(norm.weight.device)])

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        qkv = self.qkv_proj(x)
        return self.o_proj(self.attn(qkv, rope, ctx))


class SinkAttention(SelfAttention):
    """Adds a logit per head, without a value, to the softmax."""

    sinks_name: ClassVar[str] = "sinks"  # in checkpoints

    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        super().__init__(config, layer_id, mask, place)
        self.sinks = place.empty(self.qkv_proj.num_heads)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return super().weights(prefix) | {f"{prefix}{self.sinks_name}": self.sinks}

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        own = super().shards(prefix)
        return own | {f"{prefix}{self.sinks_name}": self.qkv_proj.q_heads} if own else {}

    def prepare(self) -> None:
        super().prepare()
        self.attn.spec = replace(self.attn.spec, sinks=self.sinks.float())


class BuiltDecoderLayer(DecoderLayer):
    """A layer of `self_attn` and `mlp`; where the norms stand differs."""

    attention: ClassVar[type[SelfAttention]] = SelfAttention
    rms_norm: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        self.layer_id = layer_id
        self.self_attn = self.make_attention(config, layer_id, mask, place)
        self.mlp = self.make_mlp(config, layer_id, place)
        self.add_norms(config.hidden_size, config.rms_norm_eps, place)

    @classmethod
    def make_attention(
        cls, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> TokenMixer:
        return cls.attention(config, layer_id, mask, place)

    @classmethod
    def make_mlp(
        cls, config: ModelConfig, layer_id: int, place: WeightPlacement
    ) -> GatedMLP | SparseMoE:
        return GatedMLP(config.hidden_size, config.intermediate_size, bias=False, place=place)

    def add_norms(self, size: int, eps: float, place: WeightPlacement) -> None:
        raise NotImplementedError(f"{type(self).__name__}.add_norms")


class PreNormDecoderLayer(BuiltDecoderLayer):
    """Norms what attention and MLP read, as Llama does."""

    fuses_router: ClassVar[bool] = False  # the norm before experts, with their router

    def add_norms(self, size: int, eps: float, place: WeightPlacement) -> None:
        self.input_layernorm = AddRMSNorm(size, eps, place, self.rms_norm)
        self.post_attention_layernorm = AddRMSNorm(size, eps, place, self.rms_norm)

    def prepare(self) -> None:
        super().prepare()
        self.input_layernorm.link(self.self_attn.input_proj)
        if isinstance(self.mlp, GatedMLP):
            self.post_attention_layernorm.link(self.mlp.gate_up_proj)

    def added(self, output: Pending) -> Hidden:
        """Returns what attention or MLP add to the residual stream, [T, H]: their output."""
        return output

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
        if self.fuses_router and isinstance(self.mlp, SparseMoE):
            return self.mlp.after_norm(x, residual, self.post_attention_layernorm)
        x, residual = self.post_attention_layernorm(self.added(x), residual)
        return self.added(self.mlp(x)), residual


class SandwichNormDecoderLayer(BuiltDecoderLayer):
    """Norms what attention and MLP read and what they return; names are Gemma's."""

    def add_norms(self, size: int, eps: float, place: WeightPlacement) -> None:
        self.input_layernorm = AddRMSNorm(size, eps, place, self.rms_norm)
        self.post_attention_layernorm = self.rms_norm(size, eps, place)
        self.pre_feedforward_layernorm = AddRMSNorm(size, eps, place, self.rms_norm)
        self.post_feedforward_layernorm = self.rms_norm(size, eps, place)

    def __call__(
        self,
        x: Hidden,
        residual: Tensor | None,
        rope: RopeInput,
        ctx: AttentionContext,
        aux: AuxHiddenStates,
    ) -> tuple[Hidden, Tensor | None]:
        x, residual = self.input_layernorm(x, residual)
        aux.capture(self.layer_id, residual)
        pending, residual = aux.after_attention(
            self.layer_id, self.self_attn(x, rope, ctx), residual
        )
        x = self.post_attention_layernorm(pending.result())
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x).result()), residual
