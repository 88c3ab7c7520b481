"""`enable_deterministic_inference` on a GPU for more families, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import ConfigError
from forerun.attention.capabilities import Mask
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import load_model_config
from forerun.doctor.determinism import Sizes
from forerun.executor.attention_setup import Placement, model_needs
from forerun.layers.communication import WeightPlacement
from forerun.models.registry import model_class
from forerun.speculative.base import SpecCaps
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
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gemma4-moe": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "global_head_dim": 128,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 256,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
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

META = WeightPlacement(torch.bfloat16, torch.device("meta"))


def write(folder: Path, name: str, **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**_COMMON, **FAMILIES[name], **more}))
    return str(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_of_a_family(name: str, tmp_path: Path) -> None:
    """Prompts up to 150 tokens in one pass, so that both ranges of expert kernels run."""
    hold(write(tmp_path, name))


def hold(
    model_path: str, *ways: str, device: str = "cuda", tokens: int = 160, **settings: Any
) -> None:
    """In the ways whose name contains one of `ways`, or in all."""
    report = hold_bits(
        Sizes(requests=12, tokens=tokens, ways=list(ways)),
        model_path=model_path,
        load_format="dummy_normal",
        device=device,
        dtype="bfloat16",
        enable_deterministic_inference=True,
        **settings,
    )
    assert all(way["refused"] is None for way in report["ways"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v2"])
def test_bits_of_weights_in_fp8(name: str, tmp_path: Path) -> None:
    hold(write(tmp_path, name), quantization="fp8")


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "quantized"),
    [("qwen3", FP8_BLOCKS), ("qwen3-moe", FP8_BLOCKS), ("qwen3", GPTQ), ("gpt-oss", MXFP4)],
    ids=["fp8", "fp8 experts", "gptq", "mxfp4"],
)
def test_bits_of_quantized_checkpoints(
    name: str, quantized: dict[str, Any], tmp_path: Path
) -> None:
    hold(write(tmp_path, name, quantization_config=quantized))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("name", "custom"),
    [
        ("qwen3", True), ("qwen3", False), ("qwen3-moe", True),
        ("deepseek-v2", False), ("qwen3-next", True),
    ],
)  # fmt: skip
def test_bits_of_two_ranks(name: str, custom: bool, tmp_path: Path) -> None:
    """Sums through peer memory or NCCL. A few ways: each starts two processes."""
    ways = "chunks of 7", "scoring", "num_draft_tokens 8"
    hold(write(tmp_path, name), *ways, tp_size=2, disable_custom_all_reduce=not custom)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen3", 4), ("qwen3-moe", 2), ("deepseek-v2", 2), ("qwen3-next", 2), ("olmo2", 2)],
)
def test_bits_of_ranks_on_a_cpu(
    name: str, ranks: int, tmp_path: Path, with_cpu_kernels: None
) -> None:
    """Four ranks add up in another order for more tokens, unless asked for theirs."""
    ways = "scoring", "NGRAM, num_draft_tokens 8"
    hold(write(tmp_path, name), *ways, device="cpu", tokens=48, tp_size=ranks)


def test_trees_over_recurrent_layers_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3.5")
    settings = EngineConfig(folder, skip_tokenizer_init=True, speculative_algorithm="DDTREE")
    target = load_model_config(Path(folder))
    model = model_class(target)(target, META, max_positions=1)
    caps = SpecCaps(num_drafts=8, verify_mask=Mask.CUSTOM)
    cuda, dtype = torch.device("cuda"), torch.bfloat16
    where = Placement(cuda, dtype, dtype, graphs=True, fixed_order=True)
    with pytest.raises(ConfigError, match="DDTREE drafts trees, whose sums have no fixed order"):
        model_needs(settings, model, caps, where)
    assert model_needs(settings, model, SpecCaps(num_drafts=8), where)
