"""What Forerun reads of a checkpoint's JSON files: keys, their types and their ranges.

Files are validated once, when they are read (`checked`); later code relies on types and ranges. A
key that is absent or null has its default, and keys that are not named here are let through.
Numbers are bounded where the time or memory of reading a config grows with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from forerun.core.errors import ConfigError, shown

T = TypeVar("T")

LARGEST = 1e38  # a float32
Size = Annotated[int, Meta(ge=1, le=1 << 24)]  # of a dimension
Count = Annotated[int, Meta(ge=0, le=1 << 16)]  # of heads, experts, groups; some may be none
Heads = Annotated[int, Meta(ge=1, le=1 << 16)]
Layers = Annotated[int, Meta(ge=1, le=1 << 10)]
LayerId = Annotated[int, Meta(ge=0, lt=1 << 10)]
Positions = Annotated[int, Meta(ge=1, le=1 << 30)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=-1, lt=1 << 31)]  # -1: none
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
Part = Annotated[float, Meta(gt=0, le=1)]
Object = dict[str, Any]


class RopeKeys(msgspec.Struct):
    """`rope_parameters` and `rope_scaling`, of one type of layer."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    partial_rotary_factor: Part | None = None
    rope_dim: Size | None = None  # the same as a number of dims
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    truncate: bool | None = None
    attention_factor: Positive | None = None
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None


class WeightKeys(msgspec.Struct):
    """How compressed-tensors quantized a group's weights."""

    type: str | None = None
    num_bits: Size | None = None
    block_structure: list[Size] | None = None
    group_size: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    symmetric: bool | None = None
    actorder: str | bool | None = None


class GroupKeys(msgspec.Struct):
    weights: WeightKeys | None = None


class QuantizationKeys(msgspec.Struct):
    """`quantization_config`."""

    quant_method: str | None = None
    fmt: str | None = None
    format: str | None = None
    quant_algo: str | None = None
    weight_block_size: list[Size] | None = None
    config_groups: dict[str, GroupKeys] | None = None
    bits: Size | None = None
    w_bit: Size | None = None
    version: str | None = None
    group_size: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    q_group_size: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    checkpoint_format: str | None = None


class LayerKeys(msgspec.Struct):
    """Keys of one layer in Gemma 4's `per_layer_config`."""

    head_dim: Size | UnsetType = UNSET
    num_key_value_heads: Heads | UnsetType = UNSET


class ConfigKeys(msgspec.Struct):
    """`config.json`, of all families."""

    architectures: list[str] | None = None
    model_type: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    text_config: ConfigKeys | None = None
    quantization_config: QuantizationKeys | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    # Sizes.
    vocab_size: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Layers | None = None
    max_position_embeddings: Positions | None = None
    rms_norm_eps: Annotated[float, Meta(ge=0, lt=1)] | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    # Attention.
    num_attention_heads: Heads | None = None
    num_key_value_heads: Heads | None = None
    head_dim: Size | None = None
    attention_bias: bool | None = None
    attention_out_bias: bool | None = None
    mlp_bias: bool | None = None
    use_qk_norm: bool | None = None
    layer_types: list[str] | None = None
    sliding_window: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Count | None = None
    sliding_window_pattern: Layers | None = None
    full_attention_interval: Layers | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    use_bidirectional_attention: bool | str | None = None
    # RoPE. `RopeKeys` or several of them, by type of layer.
    rope_parameters: Object | None = None
    rope_scaling: Object | None = None
    rope_theta: Positive | None = None
    rope_local_base_freq: Positive | None = None
    partial_rotary_factor: Part | None = None
    original_max_position_embeddings: Positions | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Layers | None = None
    # Latent attention.
    kv_lora_rank: Size | None = None
    q_lora_rank: Size | None = None
    qk_rope_head_dim: Size | None = None
    qk_nope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    rope_interleave: bool | None = None
    # Gated DeltaNet.
    linear_conv_kernel_dim: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_num_key_heads: Heads | None = None
    linear_num_value_heads: Heads | None = None
    # Gemma 4.
    global_head_dim: Size | None = None
    num_global_key_value_heads: Heads | None = None
    attention_k_eq_v: bool | None = None
    per_layer_config: dict[str, LayerKeys] | None = None
    layer_head_dims: list[Size] | None = None
    layer_kv_heads: list[Heads] | None = None
    num_kv_shared_layers: Count | None = None
    use_double_wide_mlp: bool | None = None
    hidden_size_per_layer_input: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    vocab_size_per_layer_input: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    enable_moe_block: bool | None = None
    top_k_experts: Count | None = None
    # Experts.
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    n_routed_experts: Count | None = None
    num_experts_per_tok: Heads | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    n_shared_experts: Count | None = None
    moe_layer_freq: Layers | None = None
    first_k_dense_replace: Count | None = None
    decoder_sparse_step: Layers | None = None
    mlp_only_layers: list[int] | None = None
    n_group: Heads | None = None
    topk_group: Heads | None = None
    topk_method: str | None = None
    scoring_func: str | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: Positive | None = None
    swiglu_alpha: Positive | None = None
    swiglu_limit: Positive | None = None
    # Multipliers of Granite.
    attention_multiplier: Positive | None = None
    embedding_multiplier: Positive | None = None
    residual_multiplier: Positive | None = None
    logits_scaling: Positive | None = None
    # Layers behind the last one.
    num_nextn_predict_layers: Count | None = None
    mtp_num_hidden_layers: Count | None = None


class ModelOptKeys(msgspec.Struct):
    """`hf_quant_config.json`, which older exports of ModelOpt have in place of
    `quantization_config`.
    """

    quantization: Object


class IndexKeys(msgspec.Struct):
    """`model.safetensors.index.json`."""

    weight_map: dict[str, str] | None = None


def checked(kind: type[T], raw: Any, where: str) -> T:
    """`raw`, parsed JSON, as a struct of typed fields (or any type that msgspec knows).

    Args:
        where: begins the error's message.

    Raises:
        ConfigError: a value is of another type, or out of range.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).replace("`", "").replace(" | null", "").partition(" - at ")
        name = path.removeprefix("$").removeprefix(".")
        reason = reason[:1].lower() + reason[1:].partition(", got ")[0]
        value = shown(_value_at(raw, path))
        named = f"{name} is {value}" if name else f"it is {value}"
        raise ConfigError(f"{where}: {named}, {reason}. Correct the file.") from None


def _value_at(raw: Any, path: str) -> Any:
    """What a path of msgspec leads to: `$.a[0].b`; `[...]` stands for any key and ends it."""
    for key, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if isinstance(raw, Mapping) and key in raw:
            raw = raw[key]
        elif isinstance(raw, list) and index.isdigit():
            raw = raw[int(index)]
        else:
            break
    return raw
