"""Rotary position embedding (arXiv 2104.09864), halves rotated as in Hugging Face's Llama.

    out = x · cos + rotate_half(x) · sin,  rotate_half([a, b]) = [-b, a]

The minus goes into the sine table, so rotate_half becomes a roll by D/2 and the whole takes three
operations, on q and k together (`rotate` in `kernels/elementwise/qk_norm_rope.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.config.model_config import RopeConfig, YarnConfig


@dataclass(eq=False)  # hashed by identity
class RopeRows:
    """RoPE of one forward's tokens (`RopeInput`): kernels index the table, others gather once."""

    table: Tensor  # [P, 2, 1, D]
    positions: Tensor  # [T] int
    # Not a `cached_property`: its lock cannot be traced.
    _gathered: tuple[Tensor, Tensor] | None = None

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [T, 1, D] each."""
        if self._gathered is None:
            cos, sin = self.table.index_select(0, self.positions).unbind(1)
            self._gathered = cos, sin
        return self._gathered

    def first(self, count: int) -> RopeRows:
        """Of the first `count` tokens."""
        return RopeRows(self.table, self.positions[:count])


def frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position for each pair of dimensions: [D/2] float32, as in transformers."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv = 1.0 / (config.theta**exponents)
    if config.scaling == "linear":
        return inv / config.factor
    if config.scaling == "llama3":
        return _llama3(inv, config)
    if config.yarn is not None:
        return _yarn(inv, config, config.yarn)
    return inv


def _llama3(inv: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are scaled by `factor`, short ones kept, others blended."""
    length = config.original_max_position
    wave = 2 * math.pi / inv
    scaled = inv / config.factor
    blend = (length / wave - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - blend) * inv / config.factor + blend * inv
    long = wave > length / config.low_freq_factor
    short = wave < length / config.high_freq_factor
    return torch.where(long, scaled, torch.where(short, inv, blended))


def _yarn(inv: Tensor, config: RopeConfig, yarn: YarnConfig) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): dims that rotate often are kept, slow ones scaled."""
    dim = 2 * len(inv)

    def index(rotations: float) -> float:
        """The (fractional) pair that rotates this often over the original length."""
        wave = config.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(config.theta))

    low, high = index(yarn.beta_fast), index(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = max(high - low, 1e-3)
    scaled = ((torch.arange(len(inv), dtype=torch.float32) - low) / span).clamp(0, 1)
    return inv / config.factor * scaled + inv * (1 - scaled)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 · mscale · ln(factor) + 1: how much sharper attention gets over a longer context."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def amplitude(config: RopeConfig) -> float:
    """The factor of cos and sin; 1 without YaRN, and where DeepSeek's two mscales are equal."""
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        whole = yarn_mscale(config.factor, yarn.mscale_all_dim)
        return yarn_mscale(config.factor, yarn.mscale) / whole
    return yarn_mscale(config.factor, 1.0)


class Rope:
    """Tables for positions 0 … max_positions - 1, shared by all layers of a model."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        angles = torch.outer(torch.arange(max_positions).float(), frequencies(config, head_dim))
        cos, sin = angles.cos() * amplitude(config), angles.sin() * amplitude(config)
        table = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)
        self.table = table.unsqueeze(2).to(device, dtype)  # [P, 2, 1, D]

    def rows(self, positions: Tensor) -> RopeRows:
        """positions [T] int; once per forward."""
        return RopeRows(self.table, positions)
