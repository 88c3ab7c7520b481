"""Quantised weights that are read: FP8 in blocks, as DeepSeek-V3 stores them.

A matrix [N, K] is `weight`, e4m3, and `weight_scale_inv` [⌈N / rows⌉, ⌈K / columns⌉]: their
product, block by block, is the weight (despite the name). It is dequantised while it is loaded.
Norms, router, embedding and LM head are stored plain, and often the MTP layer: each tensor's own
dtype says which. (DeepSeek-V3's inference/fp8_cast_bf16.py; its README_WEIGHTS, section FP8.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def fp8_blocks(config: ModelConfig) -> Fp8Blocks | None:
    """How the checkpoint's matrices are quantised; None: not at all.

    Raises:
        ConfigError: in another way.
    """
    raw = config.raw.get("quantization_config")
    if not raw:
        return None
    spec: dict[str, Any] = dict(raw)
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
