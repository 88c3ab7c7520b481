"""Rotary embedding as a config describes it: one for all layers, or one per type of layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    """Of every layer.

    transformers 5 writes `rope_parameters`, one per layer type if they differ; 4 wrote `rope_theta`
    and `rope_scaling`.

    Raises:
        ConfigError: a scaling that is not known, or factors that do not fit.
    """
    spec: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    types = raw.get("layer_types") or ()
    if any(isinstance(value, Mapping) for value in spec.values()):
        by_type = {kind: _parse(raw, of or {}, where) for kind, of in spec.items()}
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
    kind = str(spec.get("rope_type") or spec.get("type") or "default")
    if kind == "su" or (kind == "yarn" and "short_factor" in spec):
        kind = "longrope"  # its names in early Phi-3 files
    if kind not in ROPE_SCALINGS:
        raise ConfigError(
            f"{where}: rope scaling {kind!r} is not supported. Known: {', '.join(ROPE_SCALINGS)}."
        )
    longest = int(raw.get("max_position_embeddings", 4096))
    grows = kind in ("yarn", "longrope")
    key = "original_max_position_embeddings"
    # Phi-3 has it beside the other keys.
    original = spec.get(key) or (raw.get(key) if kind == "longrope" else None)
    original = int(original or (longest if grows else 8192))
    factor = spec.get("factor") or (longest / original if grows else 1.0)
    partial = spec.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    return RopeConfig(
        theta=float(spec.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        scaling=kind,
        factor=float(factor),
        low_freq_factor=float(spec.get("low_freq_factor", 1.0)),
        high_freq_factor=float(spec.get("high_freq_factor", 4.0)),
        original_max_position=original,
        partial_rotary_factor=float(partial),
        yarn=_parse_yarn(spec) if kind == "yarn" else None,
        longrope=_parse_longrope(spec, where) if kind == "longrope" else None,
    )


def _parse_yarn(spec: Mapping[str, Any]) -> YarnConfig:
    return YarnConfig(
        beta_fast=float(spec.get("beta_fast") or 32.0),
        beta_slow=float(spec.get("beta_slow") or 1.0),
        truncate=bool(spec.get("truncate", True)),
        attention_factor=_optional(spec.get("attention_factor")),
        mscale=float(spec.get("mscale") or 0.0),
        mscale_all_dim=float(spec.get("mscale_all_dim") or 0.0),
    )


def _parse_longrope(spec: Mapping[str, Any], where: str) -> LongRopeConfig:
    short, long = spec.get("short_factor"), spec.get("long_factor")
    if not short or not long or len(short) != len(long):
        raise ConfigError(
            f"{where}: longrope needs short_factor and long_factor, two lists of equal length;"
            " correct them."
        )
    return LongRopeConfig(
        short_factor=tuple(map(float, short)),
        long_factor=tuple(map(float, long)),
        attention_factor=_optional(spec.get("attention_factor")),
    )


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)
