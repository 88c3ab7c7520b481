"""Configs in one spelling: that of transformers 5, with what its classes fill in.

Files on the Hugging Face Hub were written by many versions. Some lean on defaults of the family's
class, and those of multimodal models nest the text model in `text_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Raw = dict[str, Any]

# Multimodal architectures that are served without their other parts, as the text model.
TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
# What checkpoints of embeddings call the families whose models have no LM head.
HEADLESS_MODELS = {
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
    "Qwen3MoeModel": "Qwen3MoeForCausalLM",
}


def normalised(raw: Mapping[str, Any]) -> Raw:
    """The config of the (text) model, in one spelling; what is not known stays as it is."""
    out = dict(raw)
    names = out.get("architectures")
    name = str(names[0]) if isinstance(names, list | tuple) and names else ""
    if name in TEXT_MODELS and isinstance(out.get("text_config"), Mapping):
        own = {key: out[key] for key in _OUTER if out.get(key) is not None}
        name = TEXT_MODELS[name]
        out = {**out["text_config"], **own, "architectures": [name]}
    if name in HEADLESS_MODELS:
        name = HEADLESS_MODELS[name]
        out["architectures"] = [name]
    if "hidden_act" not in out and "hidden_activation" in out:
        out["hidden_act"] = out["hidden_activation"]
    family = FAMILIES.get(name)
    return out if family is None else family(out)


# What multimodal files say outside of `text_config`, and of both parts.
_OUTER = (
    "eos_token_id",
    "bos_token_id",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
)


def _with(defaults: Raw, raw: Raw) -> Raw:
    return {**defaults, **{key: value for key, value in raw.items() if value is not None}}


def _layer_types(raw: Raw, pattern: int, others: str = "sliding_attention") -> Raw:
    """Every `pattern`-th layer attends to everything, the others to a window or as named."""
    if raw.get("layer_types"):
        return raw
    kinds = ("full_attention", others)
    layers = range(1, int(raw.get("num_hidden_layers") or 0) + 1)
    return {**raw, "layer_types": [kinds[bool(i % pattern)] for i in layers]}


def _ropes_by_type(raw: Raw, sliding_theta: float | None, theta: float) -> Raw:
    """`rope_scaling` is that of layers with full attention alone."""
    spec = raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in spec.values()):
        return raw
    theta = raw.get("rope_theta") or theta
    full = {"rope_theta": theta, **(raw.get("rope_scaling") or {}), **spec}
    sliding = {"rope_theta": sliding_theta or theta}
    ropes = {"full_attention": full, "sliding_attention": sliding}
    return {**raw, "rope_parameters": ropes}


def _gemma3(raw: Raw) -> Raw:
    defaults = {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "eos_token_id": 1,
    }
    raw = _layer_types(_with(defaults, raw), int(raw.get("sliding_window_pattern") or 6))
    return _ropes_by_type(raw, float(raw.get("rope_local_base_freq") or 1e4), 1e6)


def _gemma2(raw: Raw) -> Raw:
    defaults = {
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    capped = ("final_logit_softcapping", "attn_logit_softcapping")  # null: without
    without = {key: None for key in capped if key in raw and raw[key] is None}
    return _layer_types({**_with(defaults, raw), **without}, 2)


def _gemma4(raw: Raw) -> Raw:
    defaults = {
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "eos_token_id": 1,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
        },
    }
    without = {k: None for k in ("hidden_size_per_layer_input",) if k in raw and raw[k] is None}
    raw = _layer_types({**_with(defaults, raw), **without}, 6)
    types = [*raw["layer_types"][:-1], "full_attention"]  # the last always is
    return {**raw, "layer_types": types, **_gemma4_heads(raw, types)}


def _gemma4_heads(raw: Raw, types: list[str]) -> Raw:
    """Layers with full attention have heads of their own; files have one of two spellings."""
    full: Raw = {"head_dim": raw["global_head_dim"]}
    if raw.get("attention_k_eq_v") and raw.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = raw["num_global_key_value_heads"]
    own = raw.get("per_layer_config")
    if own is None:
        own = {str(i): full for i, kind in enumerate(types) if kind == "full_attention"}
    layers = [{**raw, **own.get(str(i), {})} for i in range(len(types))]
    return {
        "layer_head_dims": [layer["head_dim"] for layer in layers],
        "layer_kv_heads": [layer["num_key_value_heads"] for layer in layers],
    }


def _olmo3(raw: Raw) -> Raw:
    raw = _layer_types(_with({"sliding_window": 4096, "rms_norm_eps": 1e-5}, raw), 4)
    return _ropes_by_type(raw, None, 5e5)


def _glm(raw: Raw) -> Raw:
    """GLM-4 and GLM-4-MoE: half of a head is rotated; o_proj never has a bias."""
    defaults = {"partial_rotary_factor": 0.5, "attention_out_bias": False}
    return _with(defaults, raw)


def _glm_moe(raw: Raw) -> Raw:
    defaults = {
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
    }
    return _glm(_with(defaults, raw))


def _gpt_oss(raw: Raw) -> Raw:
    defaults = {"attention_bias": True, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5}
    return _layer_types(_with(defaults, raw), 2)


def _seed_oss(raw: Raw) -> Raw:
    return _with({"attention_bias": True, "attention_out_bias": False, "head_dim": 128}, raw)


def _smollm3(raw: Raw) -> Raw:
    every = int(raw.get("no_rope_layer_interval") or 4)
    layers = range(1, int(raw.get("num_hidden_layers") or 0) + 1)
    defaults = {
        "no_rope_layers": [int(i % every != 0) for i in layers],
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
    }
    return _with(defaults, raw)


def _hybrid(raw: Raw) -> Raw:
    """Qwen3-Next and Qwen3.5: every fourth layer has attention, the others are Gated DeltaNet."""
    defaults = {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "norm_topk_prob": True,
        # The 3.5 MoE has no dense layers, and its configs no such key.
        "intermediate_size": raw.get("shared_expert_intermediate_size"),
    }
    pattern = int(raw.get("full_attention_interval") or 4)
    return _layer_types(_with(defaults, raw), pattern, "linear_attention")


FAMILIES: dict[str, Callable[[Raw], Raw]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma4ForCausalLM": _gemma4,
    "Glm4ForCausalLM": _glm,
    "Glm4MoeForCausalLM": _glm_moe,
    "GptOssForCausalLM": _gpt_oss,
    "Olmo3ForCausalLM": _olmo3,
    "Qwen3NextForCausalLM": _hybrid,
    "Qwen3_5ForCausalLM": _hybrid,
    "Qwen3_5MoeForCausalLM": _hybrid,
    "SeedOssForCausalLM": _seed_oss,
    "SmolLM3ForCausalLM": _smollm3,
}
