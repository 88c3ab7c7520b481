"""Checkpoints of 4-bit integers: a loaded model equals one with the weights that they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.cpu import library
from forerun.kernels.cpu.gemm import Format
from forerun.kernels.gemm.int4 import Int4Weight
from forerun.layers.embedding import LMHead
from forerun.layers.gemm import CpuGemm
from forerun.layers.linear import LinearBase
from forerun.layers.moe import Experts
from forerun.models.formats.int4 import Awq, Gptq, Int4Format, PackQuantized
from forerun.models.loader import load_target
from tests.models.support import CPU, Loop, family, random_hf, save

GROUP = 128
HAS_KERNELS = library.serves(torch.float32, CPU)
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="no C++ compiler")


def pack(integers: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight integers along `dim` in an int32: bits 4 i have number order[i]."""
    eights = integers.long().unflatten(dim, (-1, 8)).unbind(dim + 1)
    word = sum(eights[order[i]] << 4 * i for i in range(8))
    assert isinstance(word, Tensor)
    return torch.where(word >= 2**31, word - 2**32, word).int()


def encode(
    method: str, weight: Tensor, g_idx: Tensor | None = None, size: int = GROUP
) -> tuple[dict[str, Tensor], Tensor]:
    """(stored tensors, what they mean) of random integers of a weight's shape.

    `size`: of a group of columns.
    """
    n, k = weight.shape
    generator = torch.Generator().manual_seed(n + k)
    q = torch.randint(0, 16, (n, k), generator=generator)
    zero = torch.randint(1, 16, (n, k // size), generator=generator)
    scale = (0.01 * torch.rand(n, k // size, generator=generator) + 0.001).half()
    group = torch.arange(k) // size if g_idx is None else g_idx
    meant = (q - zero[:, group]).float() * scale.float()[:, group]
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        packed = {"qweight": pack(q.t(), 1, order), "qzeros": pack(zero.t(), 1, order)}
        return packed | {"scales": scale.t()}, meant
    if method == "gptq":
        packed = {"qweight": pack(q.t(), 0), "qzeros": pack(zero.t() - 1, 1)}
        return packed | {"scales": scale.t(), "g_idx": group.int()}, meant
    packed = {"weight_packed": pack(q, 1), "weight_zero_point": pack(zero, 0)}
    shape = torch.tensor([n, k])
    return packed | {"weight_scale": scale, "weight_shape": shape}, meant


CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": False, "group_size": GROUP},
            }
        },
    },
}  # fmt: skip


def two_checkpoints(
    folder: Path, method: str, name: str = "qwen3", **config: Any
) -> tuple[Path, Path]:
    """A small model in 4 bits, and plain with what that means."""
    hf = family(name)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 8, "moe_intermediate_size": 256, "v_head_dim": 16}
    sizes |= {"q_lora_rank": 128, "kv_lora_rank": 128}
    hf = random_hf(type(hf.config)(**{**hf.config.to_dict(), **sizes, "layer_types": None}))
    quantized, plain = save(hf, folder / "int4"), save(hf, folder / "plain")
    weights = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in dict(weights).items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        g_idx = torch.arange(weight.shape[1]).flip(0) // GROUP if config.get("desc_act") else None
        packed, weights[name] = encode(method, weight, g_idx, config.get("group_size", GROUP))
        stem = name.removesuffix("weight")
        stored |= {stem + suffix: tensor.contiguous() for suffix, tensor in packed.items()}
    save_file(stored, quantized / "model.safetensors")
    save_file(weights, plain / "model.safetensors")
    set_config(quantized, {**CONFIGS[method], **config})
    return quantized, plain


def set_config(folder: Path, spec: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = spec
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("awq", {}),
        ("awq", {"group_size": 32}),
        ("gptq", {}),
        ("gptq", {"group_size": 64}),
        ("gptq", {"desc_act": True}),
        ("compressed-tensors", {}),
    ],
    ids=str,
)
def test_a_checkpoint_means_its_weights(
    method: str, config: dict[str, Any], tmp_path: Path
) -> None:
    ids = torch.arange(20)
    got, want = (
        Loop.of_model(load_target(folder, torch.float32, CPU)).ragged([(0, ids)])[0]
        for folder in two_checkpoints(tmp_path, method, **config)
    )
    assert torch.equal(got, want)


@needs_kernels
@pytest.mark.parametrize(("size", "desc_act"), [(128, False), (32, False), (128, True)])
def test_a_cpu_computes_with_the_integers(size: int, desc_act: bool, tmp_path: Path) -> None:
    """Not with reordered columns. The packed weights have the size of the stored ones."""
    quantized, _ = two_checkpoints(tmp_path, "gptq", group_size=size, desc_act=desc_act)
    model = load_target(quantized, torch.float32, CPU)
    linears = [each for each in model.modules(LinearBase) if not isinstance(each, LMHead)]
    weights = [each.gemm.weight for each in linears if isinstance(each.gemm, CpuGemm)]
    assert len(weights) == len(linears) == 8
    assert all((each.format is Format.GROUPED) != desc_act for each in weights)
    if not desc_act:
        bits = 4 + 2 * 16 / size  # a scale and a zero point, in float16
        assert all(8 * each.nbytes == bits * each.n * each.k for each in weights)


@needs_kernels
@pytest.mark.parametrize(
    ("method", "config", "kept"),
    [("awq", {}, Format.GROUPED_INT8), ("gptq", {"desc_act": True}, Format.INT8)],
    ids=str,
)
def test_int8_rounds_tokens(
    method: str, config: dict[str, Any], kept: Format, tmp_path: Path
) -> None:
    """The weights too where columns are reordered."""
    quantized, plain = two_checkpoints(tmp_path, method, **config)
    model = load_target(quantized, torch.float32, CPU, quantization="int8")
    linears = [each for each in model.modules(LinearBase) if not isinstance(each, LMHead)]
    assert all(each.gemm.weight.format is kept for each in linears)
    ids = torch.arange(20)
    got, want = (
        Loop.of_model(each).ragged([(0, ids)])[0]
        for each in (model, load_target(plain, torch.float32, CPU))
    )
    assert 0 < (got - want).norm() / want.norm() < 0.05


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared", [False, True])
def test_the_smallest_form_of_a_weight(dtype: torch.dtype, shared: bool) -> None:
    """One zero point of all groups is not stored; scales of more than 16 bits cannot be kept."""
    draw = torch.Generator().manual_seed(0)
    small = 1e-9 if dtype is torch.bfloat16 else 1e-2  # too small for float16
    scales = (small * torch.rand(64, 3, generator=draw)).to(dtype).float()
    zeros = torch.full((64, 3), 8) if shared else torch.randint(0, 17, (64, 3), generator=draw)
    q = torch.randint(0, 16, (64, 288), generator=draw)
    weight = Int4Weight.of(q, scales, zeros)
    grouped = weight.grouped()
    if dtype is torch.float32:
        assert grouped is None
        return
    assert grouped is not None and grouped.kind.scales is dtype
    assert (grouped.leasts is None) == shared
    assert torch.equal(grouped.dequantize(), weight.dequantize())
    x = torch.randn(5, 288, generator=draw)
    want = cpu.gemm(x, cpu.pack(weight.dequantize(), None, Format.FLOAT32))
    assert torch.equal(cpu.gemm(x, cpu.pack_grouped(grouped, None, torch.float32)), want)


def test_shared_experts_are_one_matrix(tmp_path: Path) -> None:
    """Two of DeepSeek's, whose columns a checkpoint has side by side."""
    ids = torch.arange(20)
    models = [
        load_target(folder, torch.float32, CPU)
        for folder in two_checkpoints(tmp_path, "awq", "deepseek-v3")
    ]
    for model in models:
        assert [each.num_shared for each in model.modules(Experts)] == [2]
    got, want = (Loop.of_model(model).ragged([(0, ids)])[0] for model in models)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("method", "changes", "on_gpu", "on_cpu"),
    [
        ("awq", {}, 128, 128),
        ("awq", {"group_size": 64}, None, 64),
        ("awq", {"group_size": 256}, 128, 256),
        ("awq", {"group_size": 8}, None, None),
        ("gptq", {"group_size": -1}, 128, 512),
        ("gptq", {"desc_act": True}, None, None),
    ],
)
def test_what_is_kept_packed(
    method: str, changes: dict[str, Any], on_gpu: int | None, on_cpu: int | None
) -> None:
    """Groups of kept weights; "meta" stands for a GPU."""
    kinds: dict[str, type[Int4Format]] = {"awq": Awq, "gptq": Gptq}
    form = kinds[method].from_config({**CONFIGS[method], **changes})
    assert form is not None
    for device, group in (("meta", on_gpu), ("cpu", on_cpu if HAS_KERNELS else None)):
        kept = form.empty_linear(32, 512, torch.device(device))
        assert (kept.group if kept is not None else None) == group


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_packed_weights(method: str) -> None:
    """Also from groups of all columns, which get the same scale several times."""
    stored, meant = encode(method, torch.empty(48, 384))
    formats: dict[str, Int4Format] = {
        "awq": Awq(GROUP),
        "gptq": Gptq(GROUP),
        "compressed-tensors": PackQuantized(GROUP),
    }
    form = formats[method]
    stored.pop("weight_shape", None)
    assert {name: tuple(t.shape) for name, t in stored.items()} == form.shapes(48, 384)
    weight = form.decode(stored, None)
    assert isinstance(weight, Int4Weight) and torch.equal(weight.dequantize(), meant)
    smaller = Int4Weight.empty(48, 384, CPU, group=64)
    smaller.copy_(weight)
    assert torch.equal(smaller.dequantize(), meant)
    again = Int4Weight.empty(48, 384, CPU)
    again.quantize_(meant)
    assert (again.dequantize() - meant).abs().max() <= meant.abs().max() / 7


def test_one_group_of_columns_that_no_kernel_takes() -> None:
    stored, meant = encode("gptq", torch.empty(48, 192), torch.zeros(192, dtype=torch.int64))
    view = torch.empty(48, 192)
    Gptq(None).load(view, stored)
    assert torch.equal(view, meant)


def test_refusals(tmp_path: Path) -> None:
    quantized, _ = two_checkpoints(tmp_path, "awq")
    with pytest.raises(ConfigError, match=r"quantized already \(awq, 4 bits\).*drop it"):
        load_target(quantized, torch.float32, CPU, quantization="fp8")
    for changes, message in [
        ({"bits": 8}, "awq with 8 bits is not supported"),
        ({"version": "gemv"}, "AWQ version gemv is not supported"),
        ({"group_size": 64}, "has shape"),
    ]:
        set_config(quantized, {**CONFIGS["awq"], **changes})
        with pytest.raises(ConfigError, match=message):
            load_target(quantized, torch.float32, CPU)
