"""Router and experts compared with transformers' modules, in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.kernels.elementwise.rms_norm import add_rms_norm_ref
from forerun.kernels.moe.config import Sm90RouterConfig
from forerun.kernels.moe.experts import expert_partials_ref
from forerun.kernels.moe.router_logits_sm90 import LogitsRouter
from forerun.kernels.moe.routing import RouterLogits, route_ref
from forerun.layers import moe
from forerun.layers.communication import WeightPlacement
from forerun.layers.gemm import LibraryGemm
from forerun.layers.linear import PendingGemm
from forerun.layers.moe import Experts, Router, Routing, SparseMoE, choose_expert_layout
from forerun.layers.residual import AddRMSNorm
from forerun.llm.bundled import preset
from forerun.models.dflash_config import load_dflash_config
from forerun.models.loader import load_target
from forerun.models.registry import model_class
from tests.models.support import CPU, CPU_F32, Loop, family, save

H, WIDTH, E, K = 64, 24, 16, 4
_SHARED: dict[str, Any] = {"moe_intermediate_size": WIDTH, "n_shared_experts": 2}

# name -> (transformers' block, config class, its overrides, our routing)
BLOCKS: dict[str, tuple[Any, Any, dict[str, Any], Routing]] = {
    "qwen3": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig,
        {"num_experts": E, "moe_intermediate_size": WIDTH, "norm_topk_prob": True},
        Routing(E, K, norm_topk_prob=True, float32_logits=False),
    ),
    "qwen3-not-normalized": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig,
        {"num_experts": E, "moe_intermediate_size": WIDTH, "norm_topk_prob": False},
        Routing(E, K, float32_logits=False),
    ),
    "deepseek-v2-greedy": (
        DeepseekV2Moe,
        DeepseekV2Config,
        {**_SHARED, "n_routed_experts": E, "topk_method": "greedy"},
        Routing(E, K, num_shared=2),
    ),
    "deepseek-v2-groups": (
        DeepseekV2Moe,
        DeepseekV2Config,
        {**_SHARED, "n_routed_experts": E, "topk_method": "group_limited_greedy", "n_group": 8,
         "topk_group": 3, "routed_scaling_factor": 16.0},
        Routing(E, K, routed_scaling_factor=16.0, n_group=8, topk_group=3, num_shared=2),
    ),
    "deepseek-v3": (
        DeepseekV3MoE,
        DeepseekV3Config,
        {**_SHARED, "n_routed_experts": E, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        Routing(
            E, K, "sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5, n_group=4,
            topk_group=2, group_score="top2", correction_bias=True, num_shared=2,
        ),
    ),
    "kimi-k2": (
        DeepseekV3MoE,
        DeepseekV3Config,
        {**_SHARED, "n_routed_experts": E, "n_group": 1, "topk_group": 1,
         "routed_scaling_factor": 2.827, "norm_topk_prob": True},
        Routing(
            E, K, "sigmoid", norm_topk_prob=True, routed_scaling_factor=2.827, n_group=1,
            topk_group=1, correction_bias=True, num_shared=2,
        ),
    ),
}  # fmt: skip


def hf_block(name: str) -> Any:
    """transformers' block with random weights, experts computed one by one."""
    kind, config, changes, _ = BLOCKS[name]
    sizes = {"hidden_size": H, "num_experts_per_tok": K, **changes}
    block = kind(config(**sizes, experts_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(0, 0.15, generator=generator)
    return block


def our_block(block: Any, routing: Routing, fused: bool) -> Any:
    """A function x -> y with the same weights, read from either layout of the experts."""
    state = dict(block.state_dict())
    if not fused:
        gate_up, down = state.pop("experts.gate_up_proj"), state.pop("experts.down_proj")
        for i in range(E):
            state[f"experts.{i}.gate_proj.weight"] = gate_up[i, :WIDTH]
            state[f"experts.{i}.up_proj.weight"] = gate_up[i, WIDTH:]
            state[f"experts.{i}.down_proj.weight"] = down[i]
    moe = SparseMoE(H, WIDTH, routing, CPU_F32)
    choose_expert_layout(moe, state)
    views = moe.weights()
    assert views.keys() == state.keys()
    for key, view in views.items():
        view.copy_(state[key].reshape(view.shape))
    moe.prepare()
    return lambda x: moe(x).result()


@pytest.mark.parametrize("tokens", [37, 140])
@pytest.mark.parametrize("name", BLOCKS)
def test_equals_transformers(name: str, tokens: int) -> None:
    block, routing = hf_block(name), BLOCKS[name][3]
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = block(x[None])[0]
        one_by_one = our_block(block, routing, fused=False)
        torch.testing.assert_close(one_by_one(x), want, rtol=1e-5, atol=2e-5)
        fused = our_block(block, routing, fused=True)
        assert torch.equal(fused(x), one_by_one(x))
        torch.testing.assert_close(fused(x[5:6]), want[5:6], rtol=1e-5, atol=2e-5)


def test_the_lowest_of_equal_experts_wins() -> None:
    logits = torch.zeros(2, E)
    logits[1, [3, 9]] = 1.0
    routed = route_ref(logits, None, Routing(E, K))
    assert routed.experts.tolist() == [[0, 1, 2, 3], [3, 9, 0, 1]]
    groups = Routing(E, K, "sigmoid", n_group=4, topk_group=2, group_score="top2")
    assert route_ref(logits, None, groups).experts.tolist() == [[0, 1, 2, 3], [3, 9, 0, 1]]


def test_the_correction_bias_chooses_and_does_not_weight() -> None:
    logits, bias = torch.zeros(1, E), torch.zeros(E)
    bias[[7, 11]] = 1.0
    routed = route_ref(logits, bias, Routing(E, 2, "sigmoid", correction_bias=True))
    assert routed.experts.tolist() == [[7, 11]]
    assert routed.weights.tolist() == [[0.5, 0.5]]


def test_the_correction_bias_stays_float32() -> None:
    place = WeightPlacement(torch.bfloat16, torch.device("cpu"))
    moe = SparseMoE(H, WIDTH, Routing(E, K, "sigmoid", correction_bias=True), place)
    assert moe.weights()["gate.e_score_correction_bias"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 17}, "17 of 16 experts per token"),
        ({"top_k": 0}, "0 of 16 experts per token"),
        ({"num_experts": 1024}, "at most 512"),
        ({"scoring": "tanh"}, "'tanh' scores"),
        ({"n_group": 3, "topk_group": 1}, "16 experts in 3 groups"),
        ({"n_group": 8, "topk_group": 1}, "do not give 4 experts"),
        ({"n_group": 16, "topk_group": 4, "group_score": "top2"}, "no second best"),
        ({"num_shared": 13}, "4 of 16 experts per token and 13 shared ones"),
        ({"num_shared": -1}, "and -1 shared ones are not supported"),
    ],
)
def test_routing_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Routing(**{"num_experts": E, "top_k": K, **change})
    assert "\n" not in str(error.value)


def test_a_checkpoint_may_hold_all_experts_in_one_tensor(tmp_path: Path) -> None:
    hf = family("qwen3-moe")
    hub, fused = save(hf, tmp_path / "hub"), tmp_path / "fused"
    name = "model.layers.1.mlp.experts."
    tensors = load_file(hub / "model.safetensors")
    assert f"{name}7.up_proj.weight" in tensors
    shutil.copytree(hub, fused)
    state = hf.state_dict()
    assert state[f"{name}gate_up_proj"].shape == (8, 48, 32)
    save_file(state, fused / "model.safetensors")
    models = [load_target(folder, torch.float32, CPU) for folder in (hub, fused)]
    ids = torch.arange(9)
    states = [Loop.of_model(model).ragged([(0, ids)])[0] for model in models]
    assert torch.equal(*states)
    tensors[f"{name}8.up_proj.weight"] = tensors[f"{name}7.up_proj.weight"].clone()
    save_file(tensors, hub / "model.safetensors")
    with pytest.raises(ConfigError, match=r"experts\.8\.up_proj\.weight, which this architecture"):
        load_target(hub, torch.float32, CPU)
    del state[f"{name}down_proj"]
    save_file(state, fused / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 tensor: .*experts.down_proj"):
        load_target(fused, torch.float32, CPU)


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    config = family("qwen3-moe").config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    config["num_experts"] = config.pop("num_local_experts")  # the Hub's name
    del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"lacks '{key}'"):
        load_target(tmp_path, torch.float32, CPU, "dummy")


@pytest.mark.parametrize("sizes", [(60, WIDTH), (H, 20)])
def test_sizes_that_a_kernel_cannot_take_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="multiples of 8"):
        Experts(E, *sizes, CPU_F32)


def test_the_preset_has_the_size_of_its_name() -> None:
    target, draft = preset("qwen3-30b-a3b")
    config = load_model_config(target)
    place = WeightPlacement(torch.bfloat16, torch.device("meta"))
    model = model_class(config)(config, place, max_positions=1)
    assert round(sum(view.numel() for view in model.weights().values()) / 1e9, 1) == 30.5
    layer = next(iter(model.modules(SparseMoE)))
    assert layer.experts.w13.shape == (128, 2 * 768, 2048)
    assert draft is not None
    assert load_dflash_config(draft).target_layer_ids == (1, 12, 23, 34, 45)


class SplitGemm(LibraryGemm):
    """Leaves two split-K partials to the norm that follows."""

    def split_k_partials(self, x: Tensor, free_smem: int = 0) -> Tensor | None:
        return torch.stack([a.float() @ b.float().T for a, b in zip_halves(x, self.weight)])


def zip_halves(x: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_norm_logits_and_choice_fused_for_few_tokens(
    monkeypatch: pytest.MonkeyPatch, tokens: int, without_cpu_kernels: None
) -> None:
    """As on Hopper, with reference implementations: the same output and residual as one by one."""
    torch.manual_seed(0)
    hidden, routing = 64, Routing(8, 2, norm_topk_prob=True)
    place = WeightPlacement(torch.float32, torch.device("cpu"))
    block, norm = SparseMoE(hidden, 32, routing, place), AddRMSNorm(hidden, 1e-6, place)
    for weight in (*block.weights().values(), *norm.weights().values()):
        weight.normal_(std=0.2)
    for module in (block.gate, block.experts, norm.norm):
        module.prepare()
    gemm = SplitGemm(torch.randn(hidden, 128), None)
    x, residual = torch.randn(tokens, 128), torch.randn(tokens, hidden)
    pending, want_residual = block.after_norm(PendingGemm(gemm, x), residual, norm)
    want, calls = pending.result(), list[str]()

    def logits_of(x: Tensor, router: LogitsRouter) -> RouterLogits:
        calls.append("logits")
        return RouterLogits(x @ router.weight.T, None, routing, router.counts)

    def norm_and_logits(
        parts: Tensor, residual: Tensor, norm: tuple[Tensor, float], router: LogitsRouter
    ) -> tuple[Tensor, Tensor, RouterLogits]:
        calls.append("norm")
        normed, total = add_rms_norm_ref(parts, residual, *norm)
        return normed, total, logits_of(normed, router)

    def partials(
        x: Tensor, w13: Tensor, w2: Tensor, routed: RouterLogits, shared: None, activation: None
    ) -> Tensor:
        return expert_partials_ref(x, w13, w2, route_ref(routed.logits, None, routing), shared)

    def router_of(router: Router, x: Tensor, width: int) -> LogitsRouter:
        assert width == 32
        return LogitsRouter(router.weight, None, routing, router._counts, Sm90RouterConfig(64, 1))

    monkeypatch.setattr(Router, "_logits_router", router_of)
    monkeypatch.setattr(moe, "norm_fits", lambda tokens, hidden: tokens <= 2)
    monkeypatch.setattr(moe, "router_logits_sm90", logits_of)
    monkeypatch.setattr(moe, "add_rms_norm_router_logits_sm90", norm_and_logits)
    monkeypatch.setattr(moe, "expert_partials", partials)
    got, got_residual = block.after_norm(PendingGemm(gemm, x), residual, norm)
    torch.testing.assert_close(got_residual, want_residual)
    torch.testing.assert_close(got.result(), want, rtol=1e-4, atol=1e-5)
    assert calls == (["norm", "logits"] if tokens <= 2 else ["logits"])
