"""FP8 blocks: a loaded model equals one whose weights were dequantised by a plain formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.models.loader import load_target
from forerun.models.quantization import Fp8Blocks
from tests.models.support import CPU, Loop, family, save

BLOCK = (24, 10)  # neither divides the sizes: ragged last blocks
PLAIN = ("norm", "embed", "lm_head", ".gate.", "bias", "eh_proj")


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3, scales, what the two mean), element by element."""
    (rows, columns), (n, k) = BLOCK, weight.shape
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


def two_checkpoints(folder: Path, name: str) -> tuple[Path, Path, int]:
    """The same weights in FP8 blocks and plain, and how many matrices are quantised."""
    model = family(name)
    quantised, plain = save(model, folder / "fp8"), save(model, folder / "plain")
    weights = load_file(plain / "model.safetensors")
    fp8: dict[str, Tensor] = {}
    for key, weight in dict(weights).items():
        if any(part in key for part in PLAIN):
            fp8[key] = weight
            continue
        fp8[key], fp8[f"{key}_scale_inv"], weights[key] = quantise(weight)
    save_file(fp8, quantised / "model.safetensors")
    save_file(weights, plain / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    spec = {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}
    config["quantization_config"] = spec
    (quantised / "config.json").write_text(json.dumps(config))
    return quantised, plain, len(fp8) - len(weights)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3"])
def test_blocks_are_dequantised_while_they_are_read(name: str, tmp_path: Path) -> None:
    quantised, plain, count = two_checkpoints(tmp_path, name)
    assert count > 20
    ids = torch.arange(20)
    got, want = (
        Loop.of_model(load_target(folder, torch.float32, CPU)).ragged([(0, ids)])[0]
        for folder in (quantised, plain)
    )
    assert torch.equal(got, want)


def test_experts_in_one_tensor_are_scaled_matrix_by_matrix() -> None:
    blocks = Fp8Blocks(*BLOCK)
    made = [quantise(torch.randn(50, 33)) for _ in range(3)]
    stored, scale, meant = (torch.stack(parts) for parts in zip(*made, strict=True))
    assert blocks.scale_shape(tuple(stored.shape)) == tuple(scale.shape) == (3, 3, 4)
    assert torch.equal(blocks.dequantise(stored, scale), meant)
