"""DeepSeek beyond what transformers shows: scales, routing, layer kinds, sizes, both MLA forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.attention.torch_native import TorchNative
from forerun.config.model_config import ModelConfig, parse_model_config
from forerun.core.errors import ConfigError
from forerun.layers.communication import WeightPlacement
from forerun.layers.mlp import GatedMLP
from forerun.layers.moe import Experts
from forerun.llm.bundled import preset
from forerun.models.deepseek import has_experts, latent_heads, routing
from forerun.models.loader import load_target
from forerun.models.nextn import NextNDraft, load_nextn_config
from forerun.models.registry import model_class
from forerun_bench.cli.inputs import with_preset
from tests.models.support import CPU, Loop, family, save

MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def yarn(factor: float, mscale: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    }


LITE = json.loads((preset("deepseek-v2-lite")[0] / "config.json").read_text())
V3: dict[str, Any] = {
    **MLA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": yarn(40, 1.0),
}
KIMI = V3 | {
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_scaling": yarn(32, 1.0),
}


def config(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config({**raw, **changes})


@pytest.mark.parametrize(
    ("raw", "m2"),
    [(LITE, 1.58963), (V3, 1.87385), (KIMI, 1.81326), (LITE | {"rope_scaling": None}, 1)],
)
def test_yarn_sharpens_the_softmax(raw: dict[str, Any], m2: float) -> None:
    assert latent_heads(config(raw)).scale == pytest.approx(192**-0.5 * m2, rel=1e-5)


@pytest.mark.parametrize(
    ("raw", "billions"), [(LITE, 15.7), (V3, 671.0), (KIMI, 1026.0)], ids=["lite", "v3", "kimi"]
)
def test_sizes_are_those_of_the_releases(raw: dict[str, Any], billions: float) -> None:
    made = config(raw)
    model = model_class(made)(made, WeightPlacement(torch.bfloat16, torch.device("meta")), 1)
    for experts in model.modules(Experts):
        experts.fused = True  # fewer tensors
    count = sum(weight.numel() for weight in model.weights().values())
    assert count / 1e9 == pytest.approx(billions, rel=2e-3)
    layout = model.kv_layout(torch.bfloat16)
    assert layout.token_bytes == 576 * 2 * raw["num_hidden_layers"]


def test_the_preset_runs_without_a_draft_by_default() -> None:
    settings = with_preset("deepseek-v2-lite", {})
    assert settings["speculative_algorithm"] == "NONE"
    assert "speculative_draft_model_path" not in settings
    asked = with_preset("deepseek-v2-lite", {"speculative_algorithm": "NEXTN"})
    nextn = load_nextn_config(Path(asked["model_path"]))  # the release has no MTP layer
    assert NextNDraft.kv_layout(nextn, torch.bfloat16).token_bytes == 576 * 2


def test_dense_layers_and_mixtures() -> None:
    made = config(V3, moe_layer_freq=2, num_hidden_layers=8)
    kinds = [has_experts(made, i) for i in range(9)]
    assert kinds == [False, False, False, False, True, False, True, False, True]
    assert not has_experts(config(V3, n_routed_experts=None), 8)
    lite = config(LITE, num_hidden_layers=3)
    model = model_class(lite)(lite, WeightPlacement(torch.bfloat16, torch.device("meta")), 1)
    kinds = [isinstance(layer.mlp, GatedMLP) for layer in model.model.layers]  # type: ignore[attr-defined]
    assert kinds == [True, False, False]


def test_shared_experts_follow_the_routed_ones(tmp_path: Path, without_cpu_kernels: None) -> None:
    """Expert i has rows i * I and on of gate and up, and these columns of down."""
    folder = save(family("deepseek-v3"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    model = load_target(folder, torch.float32, CPU)
    experts = next(iter(model.modules(Experts)))
    gate, up, down = (
        tensors[f"model.layers.1.mlp.shared_experts.{name}_proj.weight"]
        for name in ("gate", "up", "down")
    )
    assert experts.w13.shape[0] == experts.w2.shape[0] == 8 + 2
    for i in range(2):
        rows = slice(16 * i, 16 * (i + 1))
        assert torch.equal(experts.w13[8 + i], torch.cat((gate[rows], up[rows])))
        assert torch.equal(experts.w2[8 + i], down[:, rows])
    key = "model.layers.1.mlp.shared_experts.down_proj.weight"
    save_file({**tensors, key: down[:, 1:].contiguous()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{key} has shape \[32, 31\], expected .*\[32, 32\]"):
        load_target(folder, torch.float32, CPU)


def test_v2_scales_or_normalises() -> None:
    """As its own code does; transformers never normalises there."""
    groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    scaled = routing(config(LITE, routed_scaling_factor=16.0, **groups))
    assert (scaled.norm_topk_prob, scaled.routed_scaling_factor) == (False, 16.0)
    assert (scaled.scoring, scaled.group_score, scaled.groups) == ("softmax", "max", (8, 3))
    normed = routing(config(LITE, routed_scaling_factor=16.0, norm_topk_prob=True))
    assert (normed.norm_topk_prob, normed.routed_scaling_factor) == (True, 1.0)
    assert normed.groups == (1, 1)  # greedy


def test_v3_normalises_and_scales() -> None:
    for raw in (V3, {k: v for k, v in V3.items() if k not in ("topk_method", "scoring_func")}):
        made = routing(config(raw))
        assert (made.norm_topk_prob, made.routed_scaling_factor) == (True, 2.5)
        assert (made.scoring, made.group_score, made.groups) == ("sigmoid", "top2", (8, 4))
        assert made.correction_bias


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"n_shared_experts": 11}, "6 of 64 experts per token and 11 shared"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ({"num_experts_per_tok": None}, "lacks 'num_experts_per_tok'"),
        ({"topk_method": "random"}, "topk_method 'random'.*noaux_tc"),
        ({"scoring_func": "tanh"}, "'tanh'"),
    ],
)
def test_configs_are_refused_with_a_reason(changes: dict[str, Any], words: str) -> None:
    made = config(LITE, **changes)
    with pytest.raises(ConfigError, match=words):
        model_class(made)(made, WeightPlacement(torch.bfloat16, torch.device("meta")), 1)


def test_long_chunks_expand_and_others_absorb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prefill; decode absorbs. The outputs of both are held to transformers' elsewhere."""
    model = load_target(save(family("deepseek-v3"), tmp_path), torch.float32, CPU)
    seen: list[str] = []

    def recorded(name: str) -> Any:
        method = getattr(TorchNative, name)

        def recording(*args: Any) -> Any:
            seen.append(name)
            return method(*args)

        return recording

    for name in ("attend_latent", "attend_latent_prefill"):
        monkeypatch.setattr(TorchNative, name, recorded(name))
    loop, ids = Loop.of_model(model), torch.arange(60)
    for start, stop in ((0, 1), (1, 30), (30, 32), (32, 60)):
        loop.ragged([(start, ids[start:stop])])
    loop.fixed([60], torch.arange(4))
    forms = [seen[i] == "attend_latent_prefill" for i in range(0, len(seen), 3)]
    assert forms == [True, True, False, True, False]
