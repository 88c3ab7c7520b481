"""FP8 blocks and MXFP4: a loaded model equals one whose weights were dequantized before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.config.model_config import parse_model_config
from forerun.core.errors import ConfigError
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.kernels.moe.experts_mxfp4 import Mxfp4Weight
from forerun.layers.moe import Experts
from forerun.models.base import CausalLM
from forerun.models.formats.fp8 import Fp8Blocks, Fp8Rows
from forerun.models.formats.registry import weight_format
from forerun.models.loader import load_target
from tests.models.support import CPU, Loop, family, random_hf, save

BLOCK = (24, 10)  # neither divides the sizes: ragged last blocks
PLAIN = ("norm", "embed", "lm_head", ".gate.", "bias", "eh_proj")


def quantize(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3, scales, what the two mean), element by element."""
    (rows, columns), (n, k) = block, weight.shape
    scale = torch.empty(-(-n // rows), -(-k // columns))
    stored = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    meant = torch.empty(n, k)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
            meant[at] = stored[at].float() * scale[i, j]
    return stored, scale, meant


def two_checkpoints(
    folder: Path, name: Any, block: tuple[int, int] = BLOCK
) -> tuple[Path, Path, int]:
    """The same weights in FP8 blocks and plain, and how many matrices are quantized.

    `name`: of a family, or a model of transformers.
    """
    model = family(name) if isinstance(name, str) else name
    quantized, plain = save(model, folder / "fp8"), save(model, folder / "plain")
    weights = load_file(plain / "model.safetensors")
    fp8: dict[str, Tensor] = {}
    for key, weight in dict(weights).items():
        if any(part in key for part in PLAIN):
            fp8[key] = weight
            continue
        fp8[key], fp8[f"{key}_scale_inv"], weights[key] = quantize(weight, block)
    save_file(fp8, quantized / "model.safetensors")
    save_file(weights, plain / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    spec = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    config["quantization_config"] = spec
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain, len(fp8) - len(weights)


def models_of(folder: Path, name: Any) -> list[CausalLM]:
    """From a checkpoint in FP8 blocks and one of what these mean; both compute the same."""
    quantized, plain, count = two_checkpoints(folder, name)
    assert count > 20
    ids = torch.arange(20)
    models = [load_target(folder, torch.float32, CPU) for folder in (quantized, plain)]
    got, want = (Loop.of_model(model).ragged([(0, ids)])[0] for model in models)
    assert torch.equal(got, want)
    assert all(experts.quantized_gemm is None for experts in models[1].modules(Experts))
    return models


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3", "qwen3-moe"])
def test_a_checkpoint_in_blocks(name: str, tmp_path: Path) -> None:
    """Experts stay in FP8, unless they share groups: two shared ones are one matrix there."""
    experts = list(models_of(tmp_path, name)[0].modules(Experts))
    assert bool(experts) == (name != "qwen3")
    kept = None if name == "deepseek-v3" else "dequantized when loaded"  # no kernel on a CPU
    assert all(each.quantized_gemm == kept for each in experts)


def test_one_shared_expert_in_blocks(tmp_path: Path) -> None:
    """As DeepSeek V3 has it."""
    config = family("deepseek-v3").config
    config = type(config)(**{**config.to_dict(), "n_shared_experts": 1})
    [*experts] = models_of(tmp_path, random_hf(config))[0].modules(Experts)
    assert experts and all(each.num_shared == 1 and each.quantized_gemm for each in experts)


def test_rows_of_shared_experts_have_one_scale() -> None:
    """Which is that of every part of the row."""
    stored = Fp8Weight.stack((6, 20), CPU, None)
    stored.quantize_(torch.randn(6, 20))
    parts = Fp8Weight.stack((2, 6, 10), CPU, None).map(lambda tensor: tensor.transpose(0, 1))
    parts.copy_(stored)
    assert torch.equal(parts.dequantize().flatten(1), stored.dequantize())


def test_experts_in_one_tensor_are_scaled_matrix_by_matrix() -> None:
    blocks = Fp8Blocks(*BLOCK)
    made = [quantize(torch.randn(50, 33)) for _ in range(3)]
    stored, scale, meant = (torch.stack(parts) for parts in zip(*made, strict=True))
    assert blocks.scale_shapes((3, 50, 33)) == [tuple(scale.shape)] == [(3, 3, 4)]
    assert torch.equal(blocks.decode({"values": stored, "scales": scale}, None).dequantize(), meant)


def packed(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Random MXFP4 blocks and scales of `shape`[:-1] + (K,): every code, scales around 2^-3."""
    generator = torch.Generator().manual_seed(seed)
    *rows, k = shape
    blocks = torch.randint(0, 256, (*rows, k // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(122, 126, (*rows, k // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


def test_mxfp4_is_dequantized_as_in_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed((3, 10, 96), seed=1)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, K, N]
    got = Mxfp4Weight.of(blocks, scales).dequantize()
    assert torch.equal(got, want.transpose(1, 2))
    assert len(got.unique()) > 20 and got.min() < 0 < got.max()


def mxfp4_checkpoint(folder: Path, **sizes: int) -> tuple[Any, list[str]]:
    """A gpt-oss with packed experts: what it means, as a model of transformers, and their names."""
    hf = family("gpt-oss")
    config = {**hf.config.to_dict(), **sizes}
    hf = random_hf(type(hf.config)(**config, experts_implementation="eager"))
    folder = save(hf, folder)
    tensors = load_file(folder / "model.safetensors")
    experts = [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]
    assert len(experts) == 6
    for seed, name in enumerate(experts):
        e, k, n = tensors.pop(name).shape
        blocks, scales = packed((e, n, k), seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weight = Mxfp4Weight.of(blocks, scales).dequantize().transpose(1, 2)
        hf.get_parameter(name).data.copy_(weight)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return hf, experts


def test_an_mxfp4_checkpoint_of_gpt_oss(tmp_path: Path) -> None:
    """Its experts are packed; everything else is as in the checkpoint without."""
    folder = tmp_path
    hf, experts = mxfp4_checkpoint(folder, intermediate_size=64)
    model = load_target(folder, torch.float32, CPU)
    ids = torch.arange(20)
    with torch.no_grad():
        want = hf(ids[None]).logits[0]
    got = model.compute_logits(Loop.of_model(model).ragged([(0, ids)])[0])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    first, tensors = f"{experts[0]}_scales", load_file(folder / "model.safetensors")
    save_file({**tensors, first: tensors[first][:, 1:].contiguous()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{first} has shape .*, expected"):
        load_target(folder, torch.float32, CPU)


def test_modelopt_in_config_json() -> None:
    spec = {"quant_method": "modelopt", "quant_algo": "FP8"}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw: dict[str, Any] = dict.fromkeys((*names, "vocab_size"), 4)
    raw |= {"architectures": ["LlamaForCausalLM"], "quantization_config": spec}
    assert isinstance(weight_format(parse_model_config(raw)), Fp8Rows)
    spec["quant_algo"] = "NVFP4"
    with pytest.raises(ConfigError, match="modelopt, quant_algo NVFP4"):
        weight_format(parse_model_config(raw))


ROW_SPECS: list[dict[str, Any]] = [
    {"quant_method": "fp8", "activation_scheme": "static"},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
        },
    },
]


def describe(folder: Path, spec: dict[str, Any]) -> None:
    """ModelOpt's in a file of its own, as its older exports have it."""
    if spec["quant_method"] == "modelopt":
        keys = {"quant_algo": spec["quant_algo"], "exclude_modules": ["lm_head"]}
        apart = {"producer": {"name": "modelopt"}, "quantization": keys}
        (folder / "hf_quant_config.json").write_text(json.dumps(apart))
        return
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = spec
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("shape", [(-1, 1), (1,), ()], ids=str)
def test_scales_of_rows_and_of_whole_matrices(shape: tuple[int, ...], tmp_path: Path) -> None:
    """q, k and v are one matrix here, and have scales of their own."""
    model = family("qwen3")
    quantized, plain = save(model, tmp_path / "fp8"), save(model, tmp_path / "plain")
    weights = load_file(plain / "model.safetensors")
    fp8: dict[str, Tensor] = {}
    for key, weight in dict(weights).items():
        if any(part in key for part in PLAIN):
            fp8[key] = weight
            continue
        size = weight.abs().amax(1, keepdim=True) if shape == (-1, 1) else weight.abs().max()
        fp8[key] = (weight / (size / 448)).to(torch.float8_e4m3fn)
        fp8[f"{key}_scale"] = (size / 448).reshape(shape).bfloat16()
        for unused in ("input_scale", "k_scale"):
            fp8[key.replace("weight", unused)] = torch.ones(())
        weights[key] = fp8[key].float() * (size / 448).bfloat16().float()
    save_file(fp8, quantized / "model.safetensors")
    save_file(weights, plain / "model.safetensors")
    describe(quantized, ROW_SPECS[len(shape)])
    ids = torch.arange(20)
    got, want = (
        Loop.of_model(load_target(folder, torch.float32, CPU)).ragged([(0, ids)])[0]
        for folder in (quantized, plain)
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("group", [None, 16])
def test_quantized_values_are_the_nearest(group: int | None) -> None:
    weight = torch.randn(6, 40)
    weight[2] = 0
    fp8 = Fp8Weight.empty(6, 40, CPU, group)
    fp8.quantize_(weight)
    got = fp8.dequantize()
    size = weight.abs() if group else weight.abs().amax(1, keepdim=True)
    assert torch.equal(got[2], weight[2])
    assert ((got - weight).abs() <= size / 16 + weight.abs().max() / 448 / 512).all()
    assert (got - weight).norm() < 0.04 * weight.norm()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_fp8_of_a_plain_checkpoint(name: str, tmp_path: Path) -> None:
    """Every linear and expert is rounded row by row, and nothing else is."""
    model = family(name)
    plain, rounded = save(model, tmp_path / "plain"), save(model, tmp_path / "rounded")
    weights = load_file(rounded / "model.safetensors")
    for key, weight in weights.items():
        if not any(part in key for part in PLAIN):
            fp8 = Fp8Weight.empty(*weight.shape, CPU, group=None)
            fp8.quantize_(weight)
            weights[key] = fp8.dequantize()
    save_file(weights, rounded / "model.safetensors")
    ids = torch.arange(20)
    got, want = (
        Loop.of_model(load_target(folder, torch.float32, CPU, quantization=q)).ragged([(0, ids)])[0]
        for folder, q in ((plain, "fp8"), (rounded, None))
    )
    assert torch.equal(got, want)
