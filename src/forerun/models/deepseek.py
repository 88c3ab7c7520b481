"""DeepSeek-V2 (and Lite), DeepSeek-V3 / R1 and Kimi-K2: latent attention and sparse experts.

arXiv 2405.04434 (V2: MLA, group-limited routing) and 2412.19437 (V3: sigmoid scores with a
correction bias). Kimi-K2 is of V3's shape and names V3's architecture.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, RopeInput
from forerun.attention.latent import LatentDims
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import (
    ColumnLinear,
    Linear,
    LinearBase,
    MergedLinear,
    PendingGemm,
    RowLinear,
)
from forerun.layers.mla import LatentAttention, LatentHeads, LatentUpProjection, deinterleave
from forerun.layers.mlp import GatedMLP
from forerun.layers.module import Module
from forerun.layers.moe import Routing, SparseMoE
from forerun.layers.norm import RMSNorm
from forerun.layers.rope import yarn_mscale
from forerun.layers.sharding import Shard, even_shard
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import PreNormDecoderLayer

V3 = "DeepseekV3ForCausalLM"
NUM_EXPERTS = "n_routed_experts", "num_local_experts", "num_experts"
INNER_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps is


def latent_heads(config: ModelConfig) -> LatentHeads:
    """The heads of every layer.

    The softmax scale is (Dn + Dr)^-0.5, with YaRN and `mscale_all_dim` times m²,
    m = 0.1 · mscale_all_dim · ln(factor) + 1, as in the checkpoints' own modeling_deepseek.py.
    """
    dims = LatentDims(
        latent=config.need("kv_lora_rank"),
        rope=config.need("qk_rope_head_dim"),
        nope=config.need("qk_nope_head_dim"),
        v=config.need("v_head_dim"),
    )
    scale, yarn = dims.qk**-0.5, config.rope.yarn
    if yarn is not None and yarn.mscale_all_dim:
        scale *= yarn_mscale(config.rope.factor, yarn.mscale_all_dim) ** 2
    return LatentHeads(config.num_heads, dims, scale)


def has_experts(config: ModelConfig, layer_id: int) -> bool:
    """Whether the MLP of this layer is a mixture; the MTP layer has the id after the last one."""
    raw = config.raw
    freq = int(raw.get("moe_layer_freq") or 1)
    return (
        _experts_key(config) is not None
        and layer_id >= int(raw.get("first_k_dense_replace") or 0)
        and layer_id % freq == 0
    )


def _experts_key(config: ModelConfig) -> str | None:
    """Where the number of experts stands; None: there are none."""
    return next((name for name in NUM_EXPERTS if config.raw.get(name)), None)


def routing(config: ModelConfig) -> Routing:
    """Chooses by `topk_method`: greedy or group_limited_greedy (V2), noaux_tc (V3).

    Where V2 normalises the weights it does not scale them, as in its own modeling_deepseek.py
    (transformers reads neither `norm_topk_prob` nor `scoring_func` there; no release sets them).
    """
    raw, v3 = config.raw, config.architecture == V3
    method = raw.get("topk_method") or ("noaux_tc" if v3 else "greedy")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ConfigError(
            f"topk_method {method!r} is not supported. Known: greedy, group_limited_greedy,"
            " noaux_tc."
        )
    unbiased = method != "noaux_tc"
    norm = bool(raw.get("norm_topk_prob", v3))
    factor = float(raw.get("routed_scaling_factor") or 1.0)
    return Routing(
        num_experts=config.need(_experts_key(config) or NUM_EXPERTS[0]),
        top_k=config.need("num_experts_per_tok"),
        scoring=raw.get("scoring_func") or ("softmax" if unbiased else "sigmoid"),
        norm_topk_prob=norm,
        routed_scaling_factor=1.0 if norm and unbiased else factor,
        n_group=None if method == "greedy" else config.need("n_group"),
        topk_group=None if method == "greedy" else config.need("topk_group"),
        group_score="max" if unbiased else "top2",
        correction_bias=not unbiased,
        num_shared=int(raw.get("n_shared_experts") or 0),
    )


def dense_or_sparse_mlp(
    config: ModelConfig, layer_id: int, place: WeightPlacement
) -> GatedMLP | SparseMoE:
    """The first layers are dense."""
    hidden_size = config.hidden_size
    if not has_experts(config, layer_id):
        return GatedMLP(hidden_size, config.intermediate_size, config.mlp_bias, place)
    if config.mlp_bias:
        raise ConfigError("mlp_bias is not supported with a mixture of experts; it must be false.")
    return SparseMoE(hidden_size, config.need("moe_intermediate_size"), routing(config), place)


class DeepseekAttention(Module):
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        if config.qkv_bias:
            raise ConfigError("attention_bias is not supported with latent attention.")
        whole = latent_heads(config)
        own = even_shard(whole.num_heads, place.comm, "attention heads")
        heads = replace(whole, num_heads=own.count)  # of this rank
        dims, hidden_size, q_rank = heads.dims, config.hidden_size, config.raw.get("q_lora_rank")
        self.interleaved = bool(config.raw.get("rope_interleave", True))
        q, kv_a = own.scaled(dims.qk), Shard.whole(dims.latent + dims.rope)
        q_a = {"q_proj": q} if q_rank is None else {"q_a_proj": Shard.whole(int(q_rank))}
        parts = {**q_a, "kv_a_proj_with_mqa": kv_a}
        self.sizes = tuple(part.count for part in parts.values())
        self.qkv_a_proj = MergedLinear(hidden_size, parts, False, place)
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if q_rank is not None:
            self.q_a_layernorm = RMSNorm(int(q_rank), INNER_EPS, place)
            self.q_b_proj = ColumnLinear(int(q_rank), q, False, place)
        self.kv_a_layernorm = RMSNorm(dims.latent, INNER_EPS, place)
        self.kv_b_proj = LatentUpProjection(own, dims, place)
        self.attn = LatentAttention(layer_id, mask, heads, self.kv_a_layernorm, self.kv_b_proj)
        self.o_proj = RowLinear(whole.num_heads * dims.v, hidden_size, False, place)

    @property
    def input_proj(self) -> LinearBase:
        return self.qkv_a_proj

    def prepare(self) -> None:
        dims = self.kv_b_proj.dims

        def reorder_q(q: Tensor) -> Tensor:
            deinterleave(q.view(-1, dims.qk, q.shape[1])[:, dims.nope :])
            return q

        def reorder_a(qkv_a: Tensor) -> Tensor:
            q, kv_a = qkv_a.split_with_sizes(self.sizes)
            if self.q_b_proj is None:
                reorder_q(q)
            deinterleave(kv_a[dims.latent :])
            return qkv_a

        if self.interleaved:
            self.qkv_a_proj.map_rows(reorder_a)
            if self.q_b_proj is not None:
                self.q_b_proj.map_rows(reorder_q)
        super().prepare()

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        qkv_a = self.qkv_a_proj(x).result()
        q, kv_a = qkv_a.split_with_sizes(self.sizes, 1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        return self.o_proj(self.attn(q, kv_a, rope, ctx))


class DeepseekDecoderLayer(PreNormDecoderLayer):
    fuses_router = True

    @classmethod
    def make_attention(
        cls, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> DeepseekAttention:
        return DeepseekAttention(config, layer_id, mask, place)

    @classmethod
    def make_mlp(
        cls, config: ModelConfig, layer_id: int, place: WeightPlacement
    ) -> GatedMLP | SparseMoE:
        return dense_or_sparse_mlp(config, layer_id, place)


class DeepseekForCausalLM(DecoderForCausalLM):
    """DeepseekV2ForCausalLM and DeepseekV3ForCausalLM: they differ in routing alone."""

    decoder_layer = DeepseekDecoderLayer
