"""K/V scales in the weights, against an attention that divides what it stores by them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.attention.base import Plan
from forerun.core.errors import ConfigError
from forerun.kernels.gemm.int4 import Int4Weight
from forerun.kernels.gemm.quantized import Fp8Weight, QuantizedWeight
from forerun.kernels.runtime.fp8 import FP8, encode_e4m3_ref
from forerun.layers.attention import KVScales, ProjectedAttention
from forerun.models.loader import load_target
from tests.models.support import CPU, Loop, family, save

IDS = torch.arange(20)
# As stored, and rounded up to powers of two; even powers, of which roots are exact, too.
K, V = (0.2, 0.25), (3.0, 4.0)
FORMS = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "Quark": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "fused": ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
    "mapped": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
}


def edit(folder: Path, scales: dict[str, Tensor], config: str = "") -> Path:
    """Adds tensors, and to config.json."""
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **scales}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(path.read_text().rstrip()[:-1] + config + "}")
    return folder


def layers_of(folder: Path) -> list[str]:
    """`model.layers.N.` of the attentions."""
    names = load_file(folder / "model.safetensors")
    return sorted({name.split("self_attn.")[0] for name in names if "self_attn." in name})


def with_scales(folder: Path, k: Any, v: Any, form: str = "compressed-tensors") -> Path:
    found = layers_of(folder)
    made = {name: torch.tensor(value) for name, value in zip(FORMS[form], (k, v), strict=True)}
    return edit(folder, {layer + name: t.clone() for layer in found for name, t in made.items()})


def output(model: Any, kv_dtype: torch.dtype | None = None) -> Tensor:
    out: Tensor = Loop.of_model(model, kv_dtype=kv_dtype).ragged([(0, IDS)])[0]
    return out


def stored_by(model: Any, k_scale: float, v_scale: float) -> Tensor:
    """Of a model that keeps x / scale in e4m3, and reads it times the scale, in float32 pools."""
    loop = Loop.of_model(model)
    write = loop.backend.write

    def rounded(x: Tensor, scale: float) -> Tensor:
        return encode_e4m3_ref(x / scale).float() * scale

    def scaled(plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
        write(plan, layer, rounded(k, k_scale), rounded(v, v_scale))

    loop.backend.write = scaled  # type: ignore[method-assign]
    out: Tensor = loop.ragged([(0, IDS)])[0]
    return out


@pytest.mark.parametrize(
    "name",
    [
        "qwen2",  # biases
        "qwen3",  # QK-norm
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("olmo2", "gemma2", "gemma3", "gpt-oss", "glm4-moe", "phi3", "qwen3-next")
        ),
    ],
)
def test_equals_scaling_what_is_stored(name: str, tmp_path: Path) -> None:
    folder = save(family(name), tmp_path)
    want = stored_by(load_target(folder, torch.float32, CPU), K[1], V[1])
    unscaled = output(load_target(folder, torch.float32, CPU), FP8)
    with_scales(folder, K[0], V[0])
    model = load_target(folder, torch.float32, CPU, kv_dtype=FP8)
    attentions = list(model.modules(ProjectedAttention))
    assert attentions and {each.kv_scales for each in attentions} == {KVScales(K[1], V[1])}
    got = output(model, FP8)
    assert torch.equal(got, want)
    assert not torch.equal(got, unscaled)


def test_of_quantized_weights(tmp_path: Path) -> None:
    """FP8 with a scale per matrix, ModelOpt's names."""
    folder = save(family("qwen3"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj." in name]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(FP8)
        tensors[name + "_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    edit(folder, {}, ', "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}')
    want = stored_by(load_target(folder, torch.float32, CPU), K[1], V[1])
    with_scales(folder, K[0], V[0], "ModelOpt")
    assert torch.equal(output(load_target(folder, torch.float32, CPU, kv_dtype=FP8), FP8), want)


@pytest.mark.parametrize("kind", [Fp8Weight, Int4Weight])
def test_quantized_weights_times_a_power_of_two(kind: type[QuantizedWeight]) -> None:
    weight = (
        Fp8Weight.empty(6, 256, CPU, 128) if kind is Fp8Weight else Int4Weight.empty(6, 256, CPU)
    )
    weight.quantize_(torch.randn(6, 256))
    was = weight.dequantize()
    weight.map(lambda tensor: tensor[2:4]).scale_(0.25)
    assert torch.equal(weight.dequantize()[2:4], was[2:4] / 4)
    assert torch.equal(weight.dequantize()[4:], was[4:])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(family("qwen3"), tmp_path_factory.mktemp("plain"))


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def scales_of(folder: Path) -> KVScales:
    model = load_target(folder, torch.float32, CPU, kv_dtype=FP8)
    (found,) = {each.kv_scales for each in model.modules(ProjectedAttention)}
    return found


@pytest.mark.parametrize("form", FORMS)
def test_names(form: str, folder: Path) -> None:
    config = ', "quantization_config": {"quant_method": "compressed-tensors"}'  # K/V alone
    if form == "Quark":
        config = ', "quantization_config": {"quant_method": "fp8"}'
    edit(with_scales(folder, [K[0]], [V[0]], form), {}, config)
    assert scales_of(folder) == KVScales(K[1], V[1])


def test_one_scale_of_both(folder: Path) -> None:
    """AutoFP8's; and one of two that were not both calibrated."""
    layers = layers_of(folder)
    edit(folder, {f"{layer}self_attn.kv_scale": torch.tensor(0.3) for layer in layers})
    assert scales_of(folder) == KVScales(0.5, 0.5)
    assert scales_of(with_scales(folder, -1.0, 5.0)) == KVScales(8.0, 8.0)
    assert scales_of(with_scales(folder, -1.0, -1.0)) == KVScales(1.0, 1.0)


def test_rounded_up() -> None:
    assert KVScales.of(1.0, 1.001) == KVScales(1.0, 2.0)
    assert KVScales.of(0.02, 0.03125) == KVScales(0.03125, 0.03125)


def test_not_used_with_other_kv_dtypes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = output(load_target(folder, torch.float32, CPU))
    with_scales(folder, K[0], V[0])
    with caplog.at_level(logging.INFO, "forerun"):
        model = load_target(folder, torch.float32, CPU, kv_dtype=torch.float32)
    assert torch.equal(output(model), want)
    assert "has K/V scales. They are not used, because K/V is stored in float32" in caplog.text


@pytest.mark.parametrize(
    ("k", "message"),
    [
        ([0.1, 0.2], "k_scale has 2 values. K/V scales per head or channel are not supported"),
        (0.0, "k_scale is 0, not a positive number"),
        (-2.0, "k_scale is -2, not a positive number"),
        (float("nan"), "k_scale is nan, not a positive number"),
    ],
)
def test_refusals(k: Any, message: str, folder: Path) -> None:
    with_scales(folder, k, 1.0)
    with pytest.raises(ConfigError, match=message):
        load_target(folder, torch.float32, CPU, kv_dtype=FP8)
    load_target(folder, torch.float32, CPU)


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma4"])
def test_latent_kv_and_normed_values(name: str, tmp_path: Path) -> None:
    folder = save(family(name), tmp_path)
    with_scales(folder, 1.0, 1.0)
    load_target(folder, torch.float32, CPU, kv_dtype=FP8)
    with_scales(folder, 2.0, 1.0)
    with pytest.raises(ConfigError, match=r"other than 1 for latent \(MLA\) K/V"):
        load_target(folder, torch.float32, CPU, kv_dtype=FP8)
