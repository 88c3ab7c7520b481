"""Quality of quantized models: logits are as far from the plain model's as the rounding of the
weights puts them, and no further.

`rounded` is that reference: a plain checkpoint with the weights that the quantized one means, each
computed here from its integers or e4m3 values, a scale and a zero point.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM
from forerun.kernels.moe.experts_mxfp4 import Mxfp4Weight
from forerun.llm.bundled import bundled
from forerun.models.loader import load_target
from tests.models.support import CPU, Loop, family, random_hf, save
from tests.models.test_int4_formats import CONFIGS, GROUP, pack, set_config
from tests.models.test_quantization import packed

SHAPE_1B: dict[str, Any] = {
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


SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 4096}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


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


Stored = dict[str, Tensor]  # by suffix, in place of "weight"


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(integers, zero points, scales, what they mean): each group's range in 16 steps."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15)
    q = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    meant = (q - zero[..., None]) * scale.float()[..., None]
    return q.flatten(1), zero, scale, meant.flatten(1)


def awq(weight: Tensor) -> tuple[Stored, Tensor]:
    q, zero, scale, meant = four_bits(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": pack(q.t(), 1, order), "qzeros": pack(zero.t(), 1, order)}
    return stored | {"scales": scale.t()}, meant


def gptq(weight: Tensor) -> tuple[Stored, Tensor]:
    q, zero, scale, meant = four_bits(weight)
    stored = {"qweight": pack(q.t(), 0), "qzeros": pack(zero.t() - 1, 1), "scales": scale.t()}
    return stored | {"g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP}, meant


def e4m3(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(values, what they mean) with a scale for every element."""
    values = (weight.float() / scale).to(torch.float8_e4m3fn)
    return values, values.float() * scale


def fp8_rows(weight: Tensor) -> tuple[Stored, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    values, meant = e4m3(weight, scale)
    return {"weight": values, "weight_scale": scale}, meant


def fp8_blocks(weight: Tensor) -> tuple[Stored, Tensor]:
    blocks = weight.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax((1, 3)) / 448
    every = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values, meant = e4m3(weight, every)
    return {"weight": values, "weight_scale_inv": scale}, meant


FORMATS: dict[str, tuple[Callable[[Tensor], tuple[Stored, Tensor]], dict[str, Any]]] = {
    "awq": (awq, CONFIGS["awq"]),
    "gptq": (gptq, CONFIGS["gptq"]),
    "fp8 rows": (fp8_rows, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def save_model(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors")
    return folder


def three_models(folder: Path, size: str, form: str) -> tuple[Path, Path, Path]:
    """The same model plain in bfloat16, quantized, and plain with what that means."""
    torch.manual_seed(0)
    if size == "bundled":
        config = json.loads((bundled("target") / "config.json").read_text())
        weights = load_file(bundled("target") / "model.safetensors")
    else:
        config = SHAPE_1B if size == "1B" else SHAPE_1B | SMALL
        weights = random_weights(config)
    encode, spec = FORMATS[form]
    plain = {name: weight.bfloat16() for name, weight in weights.items()}
    quantized, rounded = dict(plain), dict(plain)
    for name, weight in plain.items():
        if "_proj" in name:
            stored, rounded[name] = encode(weight)
            stem = name.removesuffix("weight")
            del quantized[name]
            quantized |= {stem + suffix: tensor for suffix, tensor in stored.items()}
    return (
        save_model(folder / "plain", config, plain),
        save_model(folder / "quantized", config | {"quantization_config": spec}, quantized),
        save_model(folder / "rounded", config, rounded),
    )


def logits(folder: Path, ids: Tensor) -> Tensor:
    model = load_target(folder, torch.float32, CPU)
    return model.compute_logits(Loop.of_model(model, 1).ragged([(0, ids)])[0])


LIMITS = {  # error relative to the logits, and the share of argmax that stay the same
    ("bundled", 4): (0.16, 0.5),
    ("bundled", 8): (0.04, 0.8),
    ("small", 4): (0.42, 0.35),
    ("small", 8): (0.12, 0.7),
}


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("size", "form"),
    [
        pytest.param(size, form, marks=[] if quick else pytest.mark.exhaustive)
        for size, forms in {"bundled": ("awq",), "small": ("gptq", "fp8 blocks")}.items()
        for form in FORMATS
        for quick in [form in forms]
    ],
)
def test_quality_on_a_cpu(size: str, form: str, tmp_path: Path) -> None:
    """The error is that of the weights, and most choices stay."""
    ids = torch.arange(5, 69)
    plain, got, want = (logits(folder, ids) for folder in three_models(tmp_path, size, form))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    most_error, least_same = LIMITS[size, 8 if "fp8" in form else 4]
    assert 0 < (got - plain).norm() < most_error * plain.norm()
    assert (got.argmax(-1) == plain.argmax(-1)).float().mean() > least_same


def vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


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
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", ["bundled", "1B"])
def test_quality_on_a_gpu(size: str, form: str, tmp_path: Path) -> None:
    """The error is that of dequantized weights in bfloat16; more where tokens are rounded too."""
    plain, quantized, rounded = three_models(tmp_path, size, form)
    for tokens in (100, 400):
        most = 1.6 if form == "fp8 rows" and tokens > 128 else 1.1  # W8A8
        ids = torch.randint(5, vocab_size(plain), (tokens,)).tolist()
        exact = log_probs(ids, model_path=str(plain), dtype="float32")
        reference = log_probs(ids, model_path=str(rounded), dtype="bfloat16")
        got = log_probs(ids, model_path=str(quantized), dtype="bfloat16")
        assert 0 < (got - exact).norm() <= most * (reference - exact).norm(), tokens


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    """A random gpt-oss with MXFP4 experts, and plain with what they mean, which bfloat16 holds."""
    hf = family("gpt-oss")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    sizes["max_position_embeddings"] = 512  # prompts of 400 tokens
    hf = random_hf(type(hf.config)(**{**hf.config.to_dict(), **sizes}))
    plain, quantized = save(hf, folder / "plain"), save(hf, folder / "mxfp4")
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for seed, name in enumerate(n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))):
        e, k, n = stored.pop(name).shape
        blocks, scales = packed((e, n, k), seed)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = Mxfp4Weight.of(blocks, scales).dequantize().transpose(1, 2).contiguous()
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    set_config(quantized, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain, quantized


@pytest.mark.gpu
def test_quality_of_mxfp4_on_a_gpu(tmp_path: Path) -> None:
    plain, quantized = gpt_oss(tmp_path)
    for tokens in (100, 400):
        ids = torch.randint(5, vocab_size(plain), (tokens,)).tolist()
        exact = log_probs(ids, model_path=str(plain), dtype="float32")
        reference = log_probs(ids, model_path=str(plain), dtype="bfloat16")
        got = log_probs(ids, model_path=str(quantized), dtype="bfloat16")
        assert 0 < (got - exact).norm() <= 1.1 * (reference - exact).norm(), tokens
