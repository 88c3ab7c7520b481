"""The sequence of GEMMs and norms in a forward: what is fused, by device and number of tokens.

A Qwen3-8B of meta tensors stands for one on an H200: dispatch is the GPU's own, the kernels'
reference implementations give shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.config.model_config import parse_model_config
from forerun.kernels.communication.peers import PeerBuffers
from forerun.kernels.cpu import library
from forerun.kernels.gemm import dispatch
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.layers import gemm, linear, moe, norm
from forerun.layers.communication import SingleRank, WeightPlacement
from forerun.layers.linear import RowLinear
from forerun.models import gemma4
from forerun.models.registry import model_class
from tests.models.support import CPU_F32

META = torch.device("meta")
H200 = GpuInfo(num_sms=132, amd=False, capability=90)
LAYERS = 2
FAMILIES = [
    "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
]  # fmt: skip
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_hidden_layers": LAYERS,
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "head_dim": 4}


class Recorder:
    """Records calls by name. Also serves as the attention context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        fused = ("gemm_add_deferred_norm", "gemm_partials", "gemm_silu_mul", "gemm_argmax")
        for owner, names in (
            (gemm, ("gemm", *fused, "silu_mul", "argmax")),
            (norm, ("rms_norm", "add_rms_norm")),
            (linear, ("gelu_tanh_mul",)),
            (moe, ("route", "expert_partials", "combine")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self.recorded(name, vars(owner)[name]))
        for kind, method, label in (
            (gemm.LibraryGemm, "__call__", "library"),
            (gemm.LibraryGemm, "add_", "library_add"),
            (gemm.OneDnnGemm, "__call__", "onednn"),
            (gemm.OneDnnGemm, "add", "onednn_add"),
        ):
            monkeypatch.setattr(kind, method, self.recorded(label, vars(kind)[method]))

    def recorded(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **settings: Any) -> Any:
            self.calls.append(label)
            return function(*args, **settings)

        return recording

    def run(self, layer: int, spec: object, qkv: Tensor, *_: object) -> Tensor:
        """Returns the queries as the output of attention."""
        self.calls.append("attention")
        return qkv[:, : self.width].unsqueeze(1)

    batch = SimpleNamespace(ragged=None)  # a decode step
    plan = None
    run_latent = AttentionContext.run_latent

    @property
    def backend(self) -> Recorder:
        return self

    def rope_write_latent(self, *_: object) -> None:
        self.calls.append("rope_write")

    def attend_latent(self, layer: int, spec: object, q: Tensor) -> Tensor:
        self.calls.append("attention")
        return q[..., : self.latent_dim]

    def sequence(self, raw: dict[str, Any], place: WeightPlacement, tokens: int) -> list[str]:
        """Of a forward that captures a layer, and the LM head with argmax."""
        config = parse_model_config(raw)
        self.width = config.num_heads // place.comm.size * config.head_dim
        self.latent_dim = raw.get("kv_lora_rank", 0)
        model = model_class(config)(config, place, max_positions=8)
        model.prepare()
        self.calls.clear()
        ids = torch.zeros(tokens, dtype=torch.int64, device=place.device)
        hidden_states, _ = model.forward(ids, ids, self, (0,))  # type: ignore[arg-type]
        model.compute_argmax(hidden_states)
        return self.calls


EPILOGUE = ["gemm_add_deferred_norm"]
PARTIALS = ["gemm_partials", "add_rms_norm"]
LIBRARY = ["library", "add_rms_norm"]
IN_PLACE = ["library_add", "rms_norm"]
# tokens -> qkv_proj, o_proj + norm, gate_up_proj + SwiGLU, down_proj + norm, head
ON_H200: dict[int, tuple[list[str], ...]] = {
    1: (["gemm"], PARTIALS, ["gemm_silu_mul"], PARTIALS, ["gemm_argmax"]),
    64: (["gemm"], EPILOGUE, ["gemm_silu_mul"], PARTIALS, ["gemm_argmax"]),
    200: (["library"], LIBRARY, ["library", "silu_mul"], LIBRARY, ["library", "argmax"]),
    4096: (["library"], IN_PLACE, ["gemm_silu_mul"], IN_PLACE, ["library", "argmax"]),
}
ON_H200 |= dict.fromkeys((16, 32, 128), ON_H200[1])


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(gemm, "skinny_serves", lambda weight: True)
    monkeypatch.setattr(gemm, "gpu_of", lambda device: H200)
    monkeypatch.setattr(dispatch.nvrtc, "available", lambda: True)
    return Recorder(monkeypatch)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("tokens", ON_H200)
def test_on_an_h200(h200: Recorder, architecture: str, tokens: int) -> None:
    qkv, o_proj, gate_up, down_proj, head = ON_H200[tokens]
    layer = [*qkv, "attention", *o_proj, *gate_up, *down_proj]
    raw = QWEN3_8B | {"architectures": [architecture]}
    got = h200.sequence(raw, WeightPlacement(torch.bfloat16, META), tokens)
    assert got == ["rms_norm", *layer * LAYERS, *head]


LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "architectures": ["DeepseekV3ForCausalLM"],
}


@pytest.mark.parametrize("q_rank", [None, 1536])
@pytest.mark.parametrize("tokens", [1, 64])
def test_latent_attention_on_an_h200(h200: Recorder, q_rank: int | None, tokens: int) -> None:
    """q_a and kv_a are one GEMM; the norm of the latent row is part of its write."""
    qkv, o_proj, gate_up, down_proj, head = ON_H200[tokens]
    q_b = [] if q_rank is None else ["rms_norm", "gemm"]
    layer = [*qkv, *q_b, "rope_write", "attention", *o_proj, *gate_up, *down_proj]
    raw = QWEN3_8B | LATENT | {"q_lora_rank": q_rank}
    got = h200.sequence(raw, WeightPlacement(torch.bfloat16, META), tokens)
    assert got == ["rms_norm", *layer * LAYERS, *head]


QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
# tokens -> qkv_proj, o_proj + norm, head
EXPERTS_ON_H200: dict[int, tuple[list[str], ...]] = {
    1: (["gemm"], PARTIALS, ["gemm_argmax"]),
    200: (["library"], LIBRARY, ["library", "argmax"]),
}


@pytest.mark.parametrize("tokens", EXPERTS_ON_H200)
def test_experts_on_an_h200(h200: Recorder, tokens: int) -> None:
    """The norm after the experts adds up their outputs."""
    qkv, o_proj, head = EXPERTS_ON_H200[tokens]
    layer = [*qkv, "attention", *o_proj, "route", "expert_partials", "add_rms_norm"]
    got = h200.sequence(QWEN3_30B_A3B, WeightPlacement(torch.bfloat16, META), tokens)
    assert got == ["rms_norm", *layer * LAYERS, *head]


def test_norms_after_attention_and_mlp_on_an_h200(h200: Recorder) -> None:
    """They stand between a GEMM and the residual, so that nothing is fused with the addition."""
    block = ["gemm", "rms_norm", "add_rms_norm"]
    layer = ["gemm", "attention", *block, "gemm", "gelu_tanh_mul", *block]
    raw = QWEN3_8B | {"architectures": ["Gemma3ForCausalLM"]}
    raw |= {"layer_types": ["full_attention"] * LAYERS}
    got = h200.sequence(raw, WeightPlacement(torch.bfloat16, META), 16)
    assert got == ["rms_norm", *layer * LAYERS, "gemm_argmax"]


def test_gemma4_on_an_h200(h200: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value heads are normed apart; a layer's output is complete, so its next norm adds nothing."""
    recorded = h200.recorded("norm_values", gemma4.norm_values)
    monkeypatch.setattr(gemma4, "norm_values", recorded)
    layer = ["rms_norm", "gemm", "norm_values", "attention", "gemm", "rms_norm", "add_rms_norm"]
    layer += ["gemm", "gelu_tanh_mul", "gemm", "rms_norm"]
    raw = QWEN3_8B | {"architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0}
    raw |= {"global_head_dim": 128, "layer_types": ["full_attention"] * LAYERS}
    got = h200.sequence(raw, WeightPlacement(torch.bfloat16, META), 16)
    assert got == [*layer * LAYERS, "rms_norm", "gemm_argmax"]


def test_across_ranks_the_sum_comes_before_residual_and_norm(h200: Recorder) -> None:
    class TwoRanks(SingleRank):
        size = 2

        def all_reduce(self, x: Tensor) -> Tensor:
            h200.calls.append("all_reduce")
            return x

        def all_reduce_max(self, x: Tensor) -> Tensor:
            h200.calls.append("all_reduce_max")
            return x

    layer = ["gemm", "attention", "gemm", "all_reduce", "add_rms_norm"]
    layer += ["gemm_silu_mul", "gemm", "all_reduce", "add_rms_norm"]
    got = h200.sequence(QWEN3_8B, WeightPlacement(torch.bfloat16, META, TwoRanks()), 16)
    assert got == ["all_reduce", "rms_norm", *layer * LAYERS, "gemm", "all_reduce_max"]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_ranks_that_write_to_each_other_sum_in_the_norm(
    h200: Recorder, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """One kernel: outputs of experts, the sum over ranks, residual, norm."""

    class TwoRanks(SingleRank):
        size, peers = 2, PeerBuffers(0, torch.zeros(2), torch.zeros(2), 1)

        def all_reduce(self, x: Tensor) -> Tensor:
            h200.calls.append("all_reduce")
            return x

    def fused(x: Tensor, residual: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        h200.calls.append(f"all_reduce_add_rms_norm of {x.dim() - 1}")
        return residual, residual

    monkeypatch.setattr(norm, "all_reduce_add_rms_norm", fused)
    monkeypatch.setattr(norm.all_reduce_sm90, "fits", lambda x: True)
    raw = QWEN3_8B | {"architectures": [architecture]}
    mlp, parts = ["gemm_silu_mul", "gemm"], 1
    if architecture == "Qwen3MoeForCausalLM":
        raw |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
        mlp, parts = ["route", "expert_partials"], 2
    summed = "all_reduce_add_rms_norm of"
    layer = ["gemm", "attention", "gemm", f"{summed} 1", *mlp, f"{summed} {parts}"]
    got = h200.sequence(raw, WeightPlacement(torch.bfloat16, META, TwoRanks()), 16)
    assert got == ["all_reduce", "rms_norm", *layer * LAYERS, "gemm"]


@pytest.mark.skipif(not gemm.onednn_serves(torch.empty(1)), reason="torch without oneDNN")
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_on_a_cpu_in_float32_without_kernels(
    monkeypatch: pytest.MonkeyPatch, without_cpu_kernels: None, architecture: str, tokens: int
) -> None:
    recorder = Recorder(monkeypatch)
    plain_norm = recorder.recorded("norm", norm.RMSNorm.__call__)
    monkeypatch.setattr(norm.RMSNorm, "__call__", plain_norm)
    attention = ["onednn", "attention", "onednn_add", "norm"]
    mlp = ["onednn", "silu_mul", "onednn_add", "norm"]
    raw = QWEN3_8B | SMALL | {"architectures": [architecture]}
    got = recorder.sequence(raw, CPU_F32, tokens)
    assert got == ["norm", *(attention + mlp) * LAYERS, "onednn", "argmax"]


@pytest.mark.usefixtures("with_cpu_kernels")
@pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, architecture: str, tokens: int
) -> None:
    recorder = Recorder(monkeypatch)
    for owner in (gemm.cpu, norm.cpu):
        for name in ("gemm", "gemm_add_rms_norm", "gemm_silu_mul", "gemm_argmax", "rms_norm"):
            if name in vars(owner):
                monkeypatch.setattr(owner, name, recorder.recorded(name, vars(owner)[name]))
    layer = ["gemm", "attention", "gemm_add_rms_norm", "gemm_silu_mul", "gemm_add_rms_norm"]
    raw = QWEN3_8B | SMALL | {"architectures": [architecture]}
    got = recorder.sequence(raw, WeightPlacement(dtype, torch.device("cpu")), tokens)
    assert got == ["rms_norm", *layer * LAYERS, "gemm_argmax"]


def test_a_pending_gemm_is_read_once() -> None:
    linear = RowLinear(8, 4, False, CPU_F32)
    linear.weight.normal_()
    x = torch.randn(3, 8)
    pending = linear(x)
    torch.testing.assert_close(pending.result(), x @ linear.weight.T)
    with pytest.raises(AssertionError, match="read once"):
        pending.result()
