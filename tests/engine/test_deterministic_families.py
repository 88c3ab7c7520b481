"""`enable_deterministic_inference` on a GPU for more families, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.doctor.determinism import Sizes
from tests.determinism import hold_bits

_COMMON: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
_DELTA = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        **_EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 8,
        "head_dim": 64,
        "kv_lora_rank": 128,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "qwen3-next": {
        **_EXPERTS,
        **_DELTA,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 256,
        "partial_rotary_factor": 0.25,
    },
    "qwen3.5": {
        **_DELTA,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "partial_rotary_factor": 0.25,
        },
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
}


def write(folder: Path, name: str) -> str:
    (folder / "config.json").write_text(json.dumps({**_COMMON, **FAMILIES[name]}))
    return str(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_of_a_family(name: str, tmp_path: Path) -> None:
    """Prompts up to 150 tokens in one pass, so that both ranges of expert kernels run."""
    report = hold_bits(
        Sizes(requests=12, tokens=160),
        model_path=write(tmp_path, name),
        load_format="dummy_normal",
        device="cuda",
        dtype="bfloat16",
        enable_deterministic_inference=True,
    )
    assert all(way["refused"] is None for way in report["ways"])
