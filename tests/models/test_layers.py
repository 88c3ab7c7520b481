"""Layers compared with plain formulas and with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from forerun.config.model_config import parse_model_config
from forerun.config.rope_config import RopeConfig, YarnConfig
from forerun.kernels.elementwise.qk_norm_rope import rotate
from forerun.layers import gemm
from forerun.layers.embedding import LMHead, VocabEmbedding
from forerun.layers.gemm import LibraryGemm, OneDnnGemm, onednn_serves
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.layers.rope import Rope, frequencies
from tests.models.support import CPU, CPU_F32
from tests.property_examples import examples

packable = pytest.mark.skipif(not onednn_serves(torch.empty(1)), reason="torch without oneDNN")


@packable
@examples(25)
@given(
    tokens=st.integers(1, 90),
    size_in=st.integers(1, 130),
    size_out=st.integers(1, 130),
    bias=st.booleans(),
)
def test_onednn_gemm_equals_f_linear(tokens: int, size_in: int, size_out: int, bias: bool) -> None:
    torch.manual_seed(tokens * size_in + size_out)
    weight, x = torch.randn(size_out, size_in), torch.randn(tokens, size_in)
    b = torch.randn(size_out) if bias else None
    residual = torch.randn(tokens, size_out)
    packed = OneDnnGemm(weight.clone(), b)
    want = F.linear(x, weight, b)
    kept = residual.clone()
    torch.testing.assert_close(packed(x), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.add(x, residual), want + residual, rtol=1e-5, atol=1e-5)
    assert torch.equal(residual, kept)


@packable
def test_onednn_gemm_takes_strided_rows(without_cpu_kernels: None) -> None:
    layer = Linear.of(torch.randn(5, 8))
    x, weight = torch.randn(6, 16)[:, 4:12], layer.weight
    layer.prepare()
    assert (
        isinstance(layer.gemm, OneDnnGemm) and layer.weight.numel() == 0
    )  # the plain one is freed
    torch.testing.assert_close(layer(x), F.linear(x, weight))


def test_bfloat16_stays_plain_on_a_cpu_without_kernels(without_cpu_kernels: None) -> None:
    layer = Linear.of(torch.randn(5, 8, dtype=torch.bfloat16))
    layer.prepare()
    assert isinstance(layer.gemm, LibraryGemm) and layer.weight.shape == (5, 8)
    x = torch.randn(3, 8).bfloat16()
    assert torch.equal(layer(x), F.linear(x, layer.weight))


def test_a_large_shared_weight_is_not_copied(
    monkeypatch: pytest.MonkeyPatch, without_cpu_kernels: None
) -> None:
    monkeypatch.setattr(gemm, "MAX_SHARED_COPY", 8 * 16 * 4 - 1)
    embedding = VocabEmbedding(8, 16, CPU_F32)
    tied, own = LMHead(8, 16, CPU_F32, embedding), LMHead(8, 16, CPU_F32, None)
    tied.prepare()
    own.prepare()
    assert isinstance(tied.gemm, LibraryGemm) and (
        own.gemm.packs_weight or not onednn_serves(own.weight)
    )
    assert tied.weights() == {} and tied.weight is embedding.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm_equals_transformers(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data.normal_(1, 0.3)
    x = (torch.randn(7, 48) * scale).to(dtype)
    ours = RMSNorm.of(theirs.weight.data, 1e-5)
    torch.testing.assert_close(ours(x), theirs(x).data)  # the default tolerance of the dtype
    y = torch.randn(7, 48).to(dtype)
    normed, total = ours.add(x, y)
    assert torch.equal(total, y + x)
    torch.testing.assert_close(normed, theirs(y + x).data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_head_norm(dtype: torch.dtype) -> None:
    weight, x = torch.randn(6, 16).to(dtype), torch.randn(3, 6, 16).to(dtype)
    got = RMSNorm.of(weight, 1e-6)(x)
    want = torch.stack([RMSNorm.of(weight[h], 1e-6)(x[:, h]) for h in range(6)], 1)
    torch.testing.assert_close(got, want)


def test_norm_of_zeros_is_zero() -> None:
    norm = RMSNorm.of(torch.ones(8), 1e-6)
    assert torch.equal(norm(torch.zeros(2, 8)), torch.zeros(2, 8))


YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 5e5}
SCALINGS: dict[str, tuple[RopeConfig, dict[str, Any]]] = {
    "default": (RopeConfig(theta=5e5), {"rope_type": "default", "rope_theta": 5e5}),
    "linear": (
        RopeConfig(theta=1e4, scaling="linear", factor=4.0),
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
    "llama3": (
        RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        RopeConfig(5e5, "yarn", 16.0, original_max_position=8192, yarn=YarnConfig()),
        {**YARN, "factor": 16.0, "original_max_position_embeddings": 8192},
    ),
    "yarn-mscale": (
        RopeConfig(
            5e5,
            "yarn",
            40.0,
            original_max_position=4096,
            yarn=YarnConfig(beta_fast=16.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.707),
        ),
        {
            **YARN,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
    ),
    "yarn-untruncated": (
        RopeConfig(
            5e5,
            "yarn",
            32.0,
            original_max_position=4096,
            yarn=YarnConfig(truncate=False, attention_factor=1.25),
        ),
        {
            **YARN,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "attention_factor": 1.25,
        },
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_equals_transformers(name: str) -> None:
    ours, theirs = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=theirs,
    )
    embedding = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(frequencies(ours, 128), embedding.inv_freq, rtol=1e-6, atol=0)
    assert torch.equal(frequencies(ours, 128), embedding.inv_freq) or "yarn" in name
    read = parse_model_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    assert read == ours

    rope = Rope(ours, 128, 40000, torch.float32, CPU)
    positions = torch.tensor([0, 1, 17, 8191, 39999], dtype=torch.int32)
    q, k = torch.randn(5, 3, 128), torch.randn(5, 2, 128)
    cos, sin = embedding(q, positions[None].long())
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    cos_sin = rope.rows(positions).cos_sin
    both = rotate(torch.cat((q, k), 1), cos_sin)
    torch.testing.assert_close(both[:, :3], want[0][0].transpose(0, 1))
    torch.testing.assert_close(both[:, 3:], want[1][0].transpose(0, 1))
    torch.testing.assert_close(rotate(k, cos_sin), both[:, 3:])  # keys alone
