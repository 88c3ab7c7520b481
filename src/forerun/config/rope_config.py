"""Rotary embedding as a config describes it: one for all layers, or one per type of layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.config.schema import RopeKeys, checked
from forerun.core.errors import ConfigError

PROPORTIONAL = "proportional"
ROPE_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", PROPORTIONAL)
NO_ROPE = "none"  # a layer without positions (NoPE)


@dataclass(frozen=True)
class YarnConfig:
    """What YaRN has besides `factor` and the original length (arXiv 2309.00071)."""

    beta_fast: float = 32.0  # rotations over the original length: more are kept as they are
    beta_slow: float = 1.0  # fewer are divided by `factor`
    truncate: bool = True  # the dims between which it blends are whole numbers
    attention_factor: float | None = None  # of cos and sin; None: it follows from the others
    mscale: float = 0.0
    mscale_all_dim: float = 0.0  # DeepSeek: of the softmax scale, too


@dataclass(frozen=True)
class LongRopeConfig:
    """LongRoPE (arXiv 2402.13753): what each frequency is divided by."""

    short_factor: tuple[float, ...]  # up to the original length
    long_factor: tuple[float, ...]  # beyond it
    attention_factor: float | None = None  # of cos and sin; None: it follows from the lengths


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `scaling` is one of `ROPE_SCALINGS`, as in transformers, or `NO_ROPE`."""

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # The part of a head that is rotated: its first dims. With "proportional" the first pairs of
    # dims i and i + D/2, at the frequencies that they would have if all were rotated (Gemma 4).
    partial_rotary_factor: float = 1.0
    yarn: YarnConfig | None = None
    longrope: LongRopeConfig | None = None


def parse_ropes(raw: Mapping[str, Any], layers: int, where: str) -> tuple[RopeConfig, ...]:
    """Parses the RoPE of every layer.

    transformers 5 writes `rope_parameters`, one per layer type if they differ; 4 wrote `rope_theta`
    and `rope_scaling`.

    Raises:
        ConfigError: a scaling that is not known, or factors that do not fit.
    """
    spec: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    types = raw.get("layer_types") or ()
    if any(isinstance(value, Mapping) for value in spec.values()):
        by_type = {kind: _parse(raw, of or {}, f"{where}, {kind}") for kind, of in spec.items()}
        missing = sorted(set(types) - set(by_type))
        if missing or len(types) != layers:
            raise ConfigError(
                f"{where}: rope_parameters are given per layer type, but not for"
                f" {', '.join(missing) or 'every layer (layer_types)'}; add them."
            )
        return tuple(by_type[kind] for kind in types)
    ropes = [_parse(raw, spec, where)] * layers
    rotated = raw.get("no_rope_layers")  # 1 where a layer has positions, despite the name
    if rotated is not None:
        kept: Sequence[Any] = list(rotated) + [1] * (layers - len(rotated))
        return tuple(
            r if on else replace(r, scaling=NO_ROPE) for r, on in zip(ropes, kept, strict=False)
        )
    return tuple(ropes)


def _parse(raw: Mapping[str, Any], spec: Mapping[str, Any], where: str) -> RopeConfig:
    keys = checked(RopeKeys, spec, where)
    kind = keys.rope_type or keys.type or "default"
    if kind == "su" or (kind == "yarn" and keys.short_factor is not None):
        kind = "longrope"  # its names in early Phi-3 files
    if kind not in ROPE_SCALINGS:
        raise ConfigError(
            f"{where}: rope scaling {kind!r} is not supported. Known: {', '.join(ROPE_SCALINGS)}."
        )
    longest = int(raw.get("max_position_embeddings", 4096))
    grows = kind in ("yarn", "longrope")
    original = keys.original_max_position_embeddings
    if original is None and kind == "longrope":  # Phi-3 has it beside the other keys
        original = raw.get("original_max_position_embeddings")
    original = int(original or (longest if grows else 8192))
    rope = RopeConfig(
        theta=float(keys.rope_theta or raw.get("rope_theta") or 10000.0),
        scaling=kind,
        factor=float(keys.factor or (longest / original if grows else 1.0)),
        low_freq_factor=keys.low_freq_factor or 1.0,
        high_freq_factor=keys.high_freq_factor or 4.0,
        original_max_position=original,
        partial_rotary_factor=_rotated_part(raw, keys, where),
        yarn=_yarn(keys) if kind == "yarn" else None,
        longrope=_longrope(keys, where) if kind == "longrope" else None,
    )
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ConfigError(f"{where}: low_freq_factor is not below high_freq_factor; correct them.")
    return rope


def _rotated_part(raw: Mapping[str, Any], keys: RopeKeys, where: str) -> float:
    """The part of a head that is rotated, from a factor or from a number of dims."""
    factor = keys.partial_rotary_factor or raw.get("partial_rotary_factor")
    if keys.rope_dim is None:
        return float(factor or 1.0)
    head_dim = raw.get("qk_rope_head_dim") or raw.get("head_dim")
    head_dim = int(head_dim or raw["hidden_size"] // raw["num_attention_heads"])
    if keys.rope_dim > head_dim or int(head_dim * (factor or 1.0)) not in (keys.rope_dim, head_dim):
        raise ConfigError(
            f"{where}: rope_dim {keys.rope_dim} does not fit head_dim {head_dim} and"
            f" partial_rotary_factor {factor or 1.0}; correct config.json."
        )
    part = keys.rope_dim / head_dim
    return part if int(head_dim * part) == keys.rope_dim else math.nextafter(part, 1.0)


def _yarn(keys: RopeKeys) -> YarnConfig:
    return YarnConfig(
        beta_fast=keys.beta_fast or 32.0,
        beta_slow=keys.beta_slow or 1.0,
        truncate=keys.truncate is not False,
        attention_factor=keys.attention_factor,
        mscale=keys.mscale or 0.0,
        mscale_all_dim=keys.mscale_all_dim or 0.0,
    )


def _longrope(keys: RopeKeys, where: str) -> LongRopeConfig:
    short, long = keys.short_factor, keys.long_factor
    if not short or not long or len(short) != len(long):
        raise ConfigError(
            f"{where}: longrope needs short_factor and long_factor, two lists of equal length;"
            " correct them."
        )
    return LongRopeConfig(tuple(short), tuple(long), keys.attention_factor)
