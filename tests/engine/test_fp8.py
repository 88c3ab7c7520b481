"""`quantization fp8`: text does not depend on the draft, and the error is that of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.llm.bundled import bundled
from forerun.models.loader import load_target
from tests.models.support import CPU, Loop

PROMPTS = ["A box holds 6 pens. Tom has 3 boxes.", "def add(a, b):", "for i in range("]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "sampling_seed": 5}


@pytest.mark.exhaustive
def test_text_does_not_depend_on_the_draft() -> None:
    got = []
    for settings in ({}, {"speculative_algorithm": "DFLASH", "chunked_prefill_size": 4}):
        with LLM(device="cpu", dtype="float32", quantization="fp8", **settings) as llm:
            assert llm.explain()["quantized_weights"] == {"dequantised when loaded": 48}
            outs = llm.generate(PROMPTS, [GREEDY, SEEDED, GREEDY])
            got.append([out.output_ids for out in outs])
    assert got[0] == got[1]


def test_logits_of_the_bundled_target() -> None:
    """As far from float32's as rounding to three bits of mantissa puts them; nearly all argmax are
    the same.
    """
    ids, logits = torch.arange(5, 69), []
    for quantization in (None, "fp8"):
        model = load_target(bundled("target"), torch.float32, CPU, quantization=quantization)
        hidden, _ = Loop.of_model(model, 1).ragged([(0, ids)])
        logits.append(model.compute_logits(hidden))
    plain, fp8 = logits
    assert 0 < (fp8 - plain).norm() < 0.1 * plain.norm()
    assert (fp8.argmax(-1) == plain.argmax(-1)).float().mean() > 0.8


SHAPE_1B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def random_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Of a Qwen3 checkpoint: norms 1, matrices N(0, 0.02²)."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    names = {
        f"model.layers.{i}.{name}": shape
        for i in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    vocab = (config["vocab_size"], hidden)
    names |= {"model.norm": (hidden,), "model.embed_tokens": vocab, "lm_head": vocab}
    return {
        f"{name}.weight": torch.ones(shape) if "norm" in name else 0.02 * torch.randn(shape)
        for name, shape in names.items()
    }


def save_model(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    bf16 = {name: weight.bfloat16().contiguous() for name, weight in weights.items()}
    save_file(bf16, folder / "model.safetensors")
    return folder


def rounded_linears(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the reference dequantises them."""
    out = dict(weights)
    for name, weight in weights.items():
        if "_proj" in name:
            fp8 = Fp8Weight.empty(*weight.shape, CPU, group=None)
            fp8.quantise_(weight.bfloat16())
            out[name] = fp8.dequantise()
    return out


def log_probs(ids: list[int], **settings: Any) -> Tensor:
    """Of a prompt's tokens."""
    with LLM(device="cuda", skip_tokenizer_init=True, max_running_requests=2, **settings) as llm:
        params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        [out] = llm.generate(
            input_ids=[ids], sampling_params=params, return_logprob=True, logprob_start_len=0
        )
    values = [value for value, *_ in out.meta_info["input_token_logprobs"][1:]]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["bundled", "1B"])
@pytest.mark.parametrize(("tokens", "most"), [(100, 1.1), (400, 1.6)], ids=["W8A16", "W8A8"])
def test_quality_on_a_gpu(size: str, tokens: int, most: float, tmp_path: Path) -> None:
    """The error is that of dequantised weights in bfloat16; more where tokens are rounded too."""
    torch.manual_seed(0)
    if size == "bundled":
        config = json.loads((bundled("target") / "config.json").read_text())
        weights = load_file(bundled("target") / "model.safetensors")
    else:
        config, weights = SHAPE_1B, random_weights(SHAPE_1B)
    plain = save_model(tmp_path / "plain", config, weights)
    rounded = save_model(tmp_path / "rounded", config, rounded_linears(weights))
    ids = torch.randint(5, int(config["vocab_size"]), (tokens,)).tolist()
    exact = log_probs(ids, model_path=str(plain), dtype="float32")
    reference = log_probs(ids, model_path=str(rounded), dtype="bfloat16")
    got = log_probs(ids, model_path=str(plain), dtype="bfloat16", quantization="fp8")
    assert 0 < (got - exact).norm() <= most * (reference - exact).norm()
