"""Quantised weights that are read: FP8 in blocks (DeepSeek-V3) and MXFP4 experts (gpt-oss).

Both are dequantised while they are loaded.

FP8: a matrix [N, K] is `weight`, e4m3, and `weight_scale_inv` [⌈N / rows⌉, ⌈K / columns⌉]: their
product, block by block, is the weight (despite the name). Norms, router, embedding and LM head are
stored plain, and often the MTP layer: each tensor's own dtype says which. (DeepSeek-V3's
inference/fp8_cast_bf16.py; its README_WEIGHTS, section FP8.)

MXFP4: runs of 32 values of a row share a scale, a power of two, and have four bits each (OCP
Microscaling Formats, version 1.0). A tensor `x` [E, K, N] of a model is `x_blocks`
[E, N, K / 32, 16] and `x_scales` [E, N, K / 32], both uint8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError

SCALE = "_scale_inv"  # appended to the name of the tensor that it scales
E4M3 = "F8_E4M3"  # as safetensors names it


@dataclass(frozen=True)
class Fp8Blocks:
    """Size of a block; the last ones of a matrix may be smaller."""

    rows: int
    columns: int

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the scales of a tensor [..., N, K]."""
        *outer, n, k = shape
        return (*outer, -(-n // self.rows), -(-k // self.columns))

    def dequantise(self, weight: Tensor, scale: Tensor) -> Tensor:
        """[..., N, K] e4m3 and its scales -> [..., N, K] float32."""
        n, k = weight.shape[-2:]
        whole = scale.float().repeat_interleave(self.rows, -2)[..., :n, :]
        return weight.float() * whole.repeat_interleave(self.columns, -1)[..., :k]


MXFP4_RUN = 32  # values with one scale
BLOCKS, SCALES = "_blocks", "_scales"  # appended to the name of the tensor
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4:
    """Tensors [E, K, N], of which the runs are along K."""

    def shapes(self, view: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of blocks and scales of a tensor that fills `view` [E, K, ...]."""
        experts, k = view.shape[:2]
        n = view.numel() // (experts * k)
        return (experts, n, k // MXFP4_RUN, MXFP4_RUN // 2), (experts, n, k // MXFP4_RUN)

    def dequantise(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """blocks [..., N, R, 16] and scales [..., N, R], uint8 -> [..., N, 32 R] float32.

        A byte has two values, the first in its low bits: a sign and the index into `_E2M1`.
        """
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
        table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=blocks.device)
        exponents = scales.int().unsqueeze(-1) - 127
        return torch.ldexp(table[codes], exponents).flatten(-2)


def weight_format(config: ModelConfig) -> Fp8Blocks | Mxfp4 | None:
    """How the checkpoint's matrices are quantised; None: not at all.

    Raises:
        ConfigError: in another way.
    """
    raw = config.raw.get("quantization_config")
    if not raw:
        return None
    spec: dict[str, Any] = dict(raw)
    if spec.get("quant_method") == "mxfp4":
        return Mxfp4()
    method: Any = spec.get("quant_method", "unknown")
    block: Any = spec.get("weight_block_size")
    if method == "fp8" and spec.get("fmt", "e4m3") != "e4m3":
        method = f"fp8 {spec['fmt']}"
    elif method == "fp8" and block is None:
        method = "fp8 without weight_block_size"
    elif method == "fp8":
        pair = isinstance(block, list) and len(block) == 2
        if not pair or not all(isinstance(size, int) and size > 0 for size in block):
            raise ConfigError(
                f"weight_block_size {block} is not two positive integers; correct it."
            )
        return Fp8Blocks(*block)
    raise ConfigError(
        f"The checkpoint is quantized ({method}); use the bfloat16 or float32 checkpoint, or one in"
        " FP8 blocks (quant_method fp8 with weight_block_size)."
    )
