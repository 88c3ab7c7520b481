"""Configs as the Hub has them, and checkpoints of multimodal models of which the text is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from forerun.config.model_config import ModelConfig, parse_model_config
from forerun.config.rope_config import RopeConfig
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import DenseKV, RecurrentState
from forerun.layers.communication import WeightPlacement
from forerun.layers.rope import Rope, amplitude, frequencies, rotary_order
from forerun.models.further_layers import count_layers
from forerun.models.loader import load_target
from forerun.models.registry import model_class
from tests.models.support import CPU, CPU_F32, FAMILIES, Loop, family, randomised, save

META = WeightPlacement(torch.bfloat16, torch.device("meta"))
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def parsed(architecture: str, **changes: Any) -> ModelConfig:
    return parse_model_config({"architectures": [architecture], **SIZES, **changes})


def test_gemma3_4b_as_on_the_hub() -> None:
    """Its text config leans on defaults, names the local RoPE apart, and has no layer types."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    config = parse_model_config(raw)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.windows == (*[1024] * 5, None, 1024)
    sliding, full = RopeConfig(1e4), RopeConfig(1e6, "linear", 8.0)
    assert config.layer_ropes == (*[sliding] * 5, full, sliding)
    assert config.tie_word_embeddings and config.raw["hidden_act"] == "gelu_pytorch_tanh"
    names = model_class(config)(config, META, 1).weights()
    assert "model.layers.6.post_feedforward_layernorm.weight" in names


def test_a_multimodal_checkpoint_serves_its_text_model(tmp_path: Path) -> None:
    kind, changes = FAMILIES["gemma3"]
    del kind
    text = {**SIZES, **changes, "layer_types": None, "num_key_value_heads": 2}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = randomised(Gemma3ForConditionalGeneration(config).eval())
    ours = load_target(save(model, tmp_path), torch.float32, CPU)
    ids = torch.arange(30)
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = ours.compute_logits(Loop.of_model(ours).ragged([(0, ids)])[0])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-5)


def test_qwen3_5_35b_a3b_as_on_the_hub() -> None:
    text = {
        "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "eos_token_id": 248044,
        "shared_expert_intermediate_size": 512, "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip
    raw = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    config = parse_model_config(raw)
    assert config.architecture == "Qwen3_5MoeForCausalLM" and count_layers(config) == 1
    assert config.rope == RopeConfig(1e7, partial_rotary_factor=0.25)
    model = model_class(config)(config, META, 1)
    layout = model.kv_layout(torch.bfloat16)
    kinds = [isinstance(layer, RecurrentState) for layer in layout.layers]
    assert kinds == [*[True] * 3, False] * 2
    # Per layer a state of 32 heads in float32, and 3 inputs of the convolution in bfloat16.
    assert layout.state_bytes == 6 * ((2 << 20) + (48 << 10))
    shapes = {name: tuple(view.shape) for name, view in model.weights().items()}
    assert shapes["model.layers.0.linear_attn.in_proj_qkv.weight"] == (8192, 2048)
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (16, 2, 256, 2048)
    assert shapes["model.layers.3.mlp.shared_expert_gate.weight"] == (1, 2048)


def test_a_multimodal_qwen3_5_serves_its_text_model(tmp_path: Path) -> None:
    text = {**SIZES, **FAMILIES["qwen3.5"][1], "num_key_value_heads": 2}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
        "out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    model = randomised(Qwen3_5ForConditionalGeneration(config).eval())
    ours = load_target(save(model, tmp_path), torch.float32, CPU)
    ids = torch.arange(30)
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = ours.compute_logits(Loop.of_model(ours).ragged([(0, ids)])[0])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-5)


def test_olmo3_scales_rope_where_attention_is_full() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    config = parsed("Olmo3ForCausalLM", rope_theta=5e5, rope_scaling=yarn)
    kinds = [
        (rope.scaling, window)
        for rope, window in zip(config.layer_ropes, config.windows, strict=True)
    ]
    three, full = [("default", 4096)] * 3, ("yarn", None)
    assert kinds == [*three, full, *three]


def gemma4_31b() -> dict[str, Any]:
    """As on the Hub, with few layers."""
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    text = {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 7,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
        "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": None, "sliding_window": 1024,
        "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision",
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    return {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}


def test_gemma4_31b_as_on_the_hub() -> None:
    """Layers with full attention have their own heads; the last one always is such a layer."""
    config = parse_model_config(gemma4_31b())
    model = model_class(config)(config, META, 1)
    sliding, full = DenseKV(16, 256, torch.bfloat16), DenseKV(4, 512, torch.bfloat16)
    assert model.kv_layout(torch.bfloat16).layers == (*[sliding] * 5, full, full)
    assert config.windows == (*[1024] * 5, None, None)
    shapes = {name: tuple(view.shape) for name, view in model.weights().items()}
    layer = "model.layers.5.self_attn."
    assert shapes[f"{layer}q_proj.weight"] == (32 * 512, 5376)
    assert shapes[f"{layer}k_proj.weight"] == (4 * 512, 5376)
    assert (
        f"{layer}v_proj.weight" not in shapes and "model.layers.0.self_attn.v_proj.weight" in shapes
    )
    inv = frequencies(config.layer_ropes[5], 512)
    assert torch.count_nonzero(inv) == 64
    torch.testing.assert_close(inv[:64], 1e6 ** (-torch.arange(64) / 256))


def test_gemma4_of_later_transformers_is_the_same() -> None:
    """They write what layers have of their own as `per_layer_config`."""
    raw = gemma4_31b()
    text = raw["text_config"]
    own = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": 4}
    del text["num_global_key_value_heads"]
    text["per_layer_config"] = {"5": own, "6": own}
    again, config = parse_model_config(raw), parse_model_config(gemma4_31b())
    assert again.layer_head_dims == config.layer_head_dims
    assert again.layer_kv_heads == config.layer_kv_heads == (*[16] * 5, 4, 4)


def test_a_multimodal_gemma4_serves_its_text_model(tmp_path: Path) -> None:
    text = {**SIZES, **FAMILIES["gemma4-per-layer"][1], "num_key_value_heads": 2}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16,
    }  # fmt: skip
    config = Gemma4Config(text_config=text, vision_config=vision)
    model = randomised(Gemma4ForConditionalGeneration(config).eval())
    ours = load_target(save(model, tmp_path), torch.float32, CPU)
    ids = torch.arange(30)
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = ours.compute_logits(Loop.of_model(ours).ragged([(0, ids)])[0])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-5)


def test_gpt_oss_as_on_the_hub() -> None:
    scaling = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config = parsed(
        "GptOssForCausalLM", num_local_experts=8, num_experts_per_tok=4, experts_per_token=4,
        rope_theta=150000, rope_scaling=scaling, quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip
    assert config.windows == (128, None, 128, None, 128, None, 128) and config.head_dim == 64
    assert config.qkv_bias and config.o_bias
    yarn = config.rope.yarn
    assert yarn is not None and not yarn.truncate
    assert abs(amplitude(config.rope) - 1.34657) < 1e-5
    model = model_class(config)(config, META, 1)
    assert model.has_attention_sinks
    names = model.weights()
    assert names["model.layers.0.self_attn.sinks"].shape == (4,)
    assert names["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 48, 2)
    assert names["model.layers.0.mlp.router.bias"].shape == (8,)


def test_layers_without_rope() -> None:
    config = parsed("SmolLM3ForCausalLM")
    assert [rope.scaling for rope in config.layer_ropes] == [
        *["default"] * 3,
        "none",
        *["default"] * 3,
    ]
    place = CPU_F32
    table = Rope(config.layer_ropes[3], 16, 5, place.dtype, place.device).table
    assert torch.equal(table[:, 0], torch.ones(5, 1, 16)) and not table[:, 1].any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_order_keeps_scores(interleaved: bool) -> None:
    """Reordered heads with whole-head RoPE, against the partial embedding as it is defined."""
    rope, dim = RopeConfig(100.0, partial_rotary_factor=0.5), 16
    q, k = torch.randn(2, 9, dim, dtype=torch.float64)
    angles = torch.outer(torch.arange(9.0), frequencies(rope, dim)[:4]).double()
    phase = torch.polar(torch.ones_like(angles), angles)

    def defined(x: torch.Tensor) -> torch.Tensor:
        first, rest = x.split([8, 8], 1)
        pairs = first.view(-1, 4, 2) if interleaved else first.view(-1, 2, 4).transpose(1, 2)
        turned = torch.view_as_complex(pairs.contiguous()) * phase
        return torch.cat((torch.view_as_real(turned).flatten(1), rest), 1)

    order = rotary_order(rope, dim, interleaved)
    cos, sin = Rope(rope, dim, 9, torch.float64, CPU).table.unbind(1)

    def ours(x: torch.Tensor) -> torch.Tensor:
        x = x[:, order]
        return x * cos[:, 0] + x.roll(dim // 2, 1) * sin[:, 0]

    torch.testing.assert_close(ours(q) @ ours(k).T, defined(q) @ defined(k).T, rtol=0, atol=1e-6)


def test_longrope_is_chosen_by_the_length_of_the_context() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    spec = {"rope_type": "su", "original_max_position_embeddings": 4096, **factors}
    rope = parsed(
        "Phi3ForCausalLM", head_dim=8, rope_scaling=spec, max_position_embeddings=65536
    ).rope
    short = frequencies(rope, 8, 4096 + 20)  # with positions in reserve for drafts
    torch.testing.assert_close(frequencies(rope, 8, 65536), short / torch.tensor([2.0, 3, 4, 5]))


HALF_ROPE = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("Glm4ForCausalLM", {"head_dim": 6}, "rotates 3 dims"),
        ("Gemma3ForCausalLM", {"hidden_act": "gelu"}, "has gelu_pytorch_tanh only"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "must|causal"),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, "causal"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 3}, "no full_attention layer before"),
        ("Gemma4ForCausalLM", {"vocab_size_per_layer_input": 90}, "90 is below vocab_size 96"),
        ("Gemma4ForCausalLM", {"global_head_dim": 5}, "head_dim 5 is odd"),
        (
            "Gemma4ForCausalLM",
            {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), HALF_ROPE)},
            "goes with rope_type proportional",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "1 factors for 8 pairs",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": []}},
            "two lists of equal length",
        ),
        (
            "Olmo3ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "not for sliding_attention",
        ),
    ],
)
def test_refusals(architecture: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config = parsed(architecture, **changes)
        model_class(config)(config, META, 1)


@pytest.mark.parametrize("name", ["gemma3", "gemma4-per-layer"])
def test_gemma_in_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    """Gemma 3's norms have float32 factors; all of Gemma 4's are rounded once, after the factor."""
    hf = family(name)
    model = load_target(save(hf, tmp_path), torch.bfloat16, CPU)
    ids = torch.arange(30)
    with torch.no_grad():
        want = hf.to(torch.bfloat16)(ids[None]).logits[0].float()
        exact = hf.float()(ids[None]).logits[0]
    got = model.compute_logits(Loop.of_model(model).ragged([(0, ids)])[0])
    assert got.dtype == torch.bfloat16
    assert (got.float() - exact).abs().mean() < 1.5 * (want - exact).abs().mean()


def test_a_capped_argmax_is_that_of_the_logits(tmp_path: Path) -> None:
    """In bfloat16 the cap makes logits equal that were not."""
    model = load_target(save(family("gemma3-linear-softcap"), tmp_path), torch.bfloat16, CPU)
    hidden = torch.randn(64, 32, dtype=torch.bfloat16) * 3
    logits = model.compute_logits(hidden)
    assert (logits == logits.max(1, keepdim=True).values).sum(1).max() > 1
    first = (logits == logits.max(1, keepdim=True).values).int().argmax(1)
    assert torch.equal(model.compute_argmax(hidden), first)
    assert json.loads((tmp_path / "config.json").read_text())["final_logit_softcapping"] == 3.0


def test_yarn_extends_the_context_of_a_file_that_keeps_the_shorter_length() -> None:
    """As model cards tell: only `rope_scaling` is added."""
    spec = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for longest, scaling, expected in (
        (40960, spec, 131072),
        (131072, spec, 131072),
        (262144, spec, 262144),
        (40960, {**spec, "rope_type": "linear"}, 40960),
        (40960, None, 40960),
    ):
        config = parsed("Qwen3ForCausalLM", max_position_embeddings=longest, rope_scaling=scaling)
        assert config.longest_context == expected and config.max_position == longest
