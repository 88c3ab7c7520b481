"""Rotary position embedding (arXiv 2104.09864), halves rotated as in Hugging Face's Llama.

    out = x · cos + rotate_half(x) · sin,  rotate_half([a, b]) = [-b, a]

The minus goes into the sine table, so rotate_half becomes a roll by D/2 and the whole takes three
operations, on q and k together (`rotate` in `kernels/elementwise/qk_norm_rope.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.config.rope_config import (
    NO_ROPE,
    PROPORTIONAL,
    LongRopeConfig,
    RopeConfig,
    YarnConfig,
)


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
        """Returns the rows of the first `count` tokens."""
        return RopeRows(self.table, self.positions[:count])


def frequencies(config: RopeConfig, head_dim: int, max_positions: int = 0) -> Tensor:
    """Radians per position for each pair of dimensions: [D/2] float32, as in transformers.

    Of a partial embedding the pairs behind the rotated ones have 0: they stay as they are.
    `max_positions`: how far positions go, where the frequencies depend on it (LongRoPE).
    """
    rotated = torch.zeros(head_dim // 2)
    if config.scaling != NO_ROPE:
        if config.scaling == PROPORTIONAL:
            inv = _frequencies(config, head_dim, 0)[: rotary_dims(config, head_dim) // 2]
        else:
            inv = _frequencies(config, rotary_dims(config, head_dim), max_positions)
        rotated[: len(inv)] = inv
    return rotated


def rotary_dims(config: RopeConfig, head_dim: int) -> int:
    """How many dims of a head are rotated."""
    if config.scaling == PROPORTIONAL:
        return 2 * int(head_dim * config.partial_rotary_factor // 2)
    return int(head_dim * config.partial_rotary_factor)


def _frequencies(config: RopeConfig, dim: int, max_positions: int) -> Tensor:
    """Returns the frequencies of `dim` rotated dims."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv = 1.0 / (config.theta**exponents)
    if config.scaling in ("linear", PROPORTIONAL):
        return inv / config.factor
    if config.scaling == "llama3":
        return _llama3(inv, config)
    if config.yarn is not None:
        return _yarn(inv, config, config.yarn)
    if config.longrope is not None:
        return inv / torch.tensor(_longrope_factors(config, config.longrope, max_positions))
    return inv


# Positions past the context that the rotary tables have for drafts; they are part of no text.
RESERVED_POSITIONS = 256


def _longrope_factors(
    config: RopeConfig, longrope: LongRopeConfig, max_positions: int
) -> tuple[float, ...]:
    """Chosen once, by how long a text may get: K/V with the other factors would be invalid.

    transformers changes them when a text passes the original length.
    """
    long = max_positions > config.original_max_position + RESERVED_POSITIONS
    return longrope.long_factor if long else longrope.short_factor


def rotary_order(config: RopeConfig, head_dim: int, interleaved: bool = False) -> Tensor:
    """Returns the order of a head's dims for halves of the whole head to be rotated: [D] int64.

    A checkpoint has the rotated dims first, as halves or, `interleaved`, as neighbouring pairs.
    With "proportional" they are spread over the whole head already.
    Queries and keys are reordered alike, so their products stay what they are.
    """
    rotary = head_dim if config.scaling == PROPORTIONAL else rotary_dims(config, head_dim)
    dims = torch.arange(rotary)
    pairs = dims.view(-1, 2) if interleaved else dims.view(2, -1).T
    rest = torch.arange(rotary, head_dim).view(2, -1).T
    return torch.cat((pairs, rest)).T.flatten()


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
    if config.longrope is not None:
        return _longrope_amplitude(config, config.longrope)
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        whole = yarn_mscale(config.factor, yarn.mscale_all_dim)
        return yarn_mscale(config.factor, yarn.mscale) / whole
    return yarn_mscale(config.factor, 1.0)


def _longrope_amplitude(config: RopeConfig, longrope: LongRopeConfig) -> float:
    if longrope.attention_factor is not None:
        return longrope.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))


class Rope:
    """Tables for positions 0 … max_positions - 1, shared by the layers of a model."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inv = frequencies(config, head_dim, max_positions)
        angles = torch.outer(torch.arange(max_positions).float(), inv)
        # What is not rotated is not scaled either.
        scale = torch.where(inv == 0, 1.0, amplitude(config))
        cos, sin = angles.cos() * scale, angles.sin() * scale
        table = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)
        self.table = table.unsqueeze(2).to(device, dtype)  # [P, 2, 1, D]

    def rows(self, positions: Tensor) -> RopeRows:
        """positions [T] int; once per forward."""
        return RopeRows(self.table, positions)


class LayerRopes:
    """The tables of every layer of a model; layers that are alike share one."""

    def __init__(
        self,
        kinds: Sequence[tuple[RopeConfig, int]],
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`kinds`: of each layer, and how many dims of a head the table has."""
        different = list(dict.fromkeys(kinds))
        self._ropes = [Rope(rope, dim, max_positions, dtype, device) for rope, dim in different]
        self._rope_of = [different.index(kind) for kind in kinds]

    def rows(self, positions: Tensor) -> list[RopeRows]:
        """Returns the rows of every layer, the same ones where layers are alike."""
        rows = [rope.rows(positions) for rope in self._ropes]
        return [rows[rope] for rope in self._rope_of]
