"""Configs of DFlash drafts, of z-lab and of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.attention.base import LayerMask, Mask
from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig, parse_model_config
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.communication import SINGLE_RANK, Communicator
from forerun.models.draft_base import dense_layout
from forerun.models.registry import check_layers


@dataclass(frozen=True)
class DFlashConfig:
    """A draft's shape and how it was trained; the same fields for both checkpoint formats."""

    model: ModelConfig
    block_size: int  # tokens of a block, the last sampled one among them
    target_layer_ids: tuple[int, ...]  # decoder layers whose outputs it reads
    mask_token_id: int | None  # None: only the string is known
    mask_token: str | None  # for the tokenizer to look up
    num_target_layers: int | None  # layers of the target it was trained for, if stated
    target_hidden_size: int
    draft_vocab_size: int  # smaller than the target's if it is pruned
    sample_from_anchor: bool  # token 0 predicts too; then token j predicts position start + j + 1
    sliding_non_causal: bool  # sliding layers see the whole block, as full ones do

    @property
    def num_drafts(self) -> int:
        """K: tokens a full block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def aux_hidden_size(self) -> int:
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def num_heads(self) -> int:
        return self.model.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.model.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.model.head_dim

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def kv_layout(self, kv_dtype: torch.dtype, comm: Communicator = SINGLE_RANK) -> ModelLayout:
        """What the layers keep on a rank."""
        return dense_layout(self.model, self.num_layers, kv_dtype, comm)

    def layer_masks(self, window: int | None = None) -> tuple[LayerMask, ...]:
        """One per layer; `window` limits each context further than training did."""
        masks = []
        for trained in self.model.windows:
            kind = Mask.BLOCK if trained is None or self.sliding_non_causal else Mask.CAUSAL
            limits = [size for size in (trained, window) if size is not None]
            masks.append(LayerMask(kind, min(limits, default=None)))
        return tuple(masks)


def load_dflash_config(folder: Path) -> DFlashConfig:
    """Reads a draft's `config.json`, of either format.

    Raises:
        ConfigError: not a DFlash draft, or a field missing or out of range.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; give the path of the draft model's folder, or org/name of"
            " one on the Hub."
        )
    path = folder / "config.json"
    return parse_dflash_config(read_json(path), where=str(path))


def parse_dflash_config(raw: Mapping[str, Any], where: str = "config") -> DFlashConfig:
    if "speculators_model_type" in raw:
        config = _parse_speculators(raw, where)
    elif "dflash_config" in raw or "DFlashDraftModel" in (raw.get("architectures") or ()):
        config = _parse_zlab(raw, where)
    else:
        raise ConfigError(
            f"{where} is not a DFlash draft: it has neither dflash_config (z-lab) nor"
            " speculators_model_type (speculators)."
        )
    _check(config, where)
    return config


def _parse_zlab(raw: Mapping[str, Any], where: str) -> DFlashConfig:
    inner: Mapping[str, Any] = raw.get("dflash_config") or {}
    model = parse_model_config(raw, where=where)
    layers = raw.get("num_target_layers")
    ids = inner.get("target_layer_ids")
    if ids is None:
        if layers is None:
            raise ConfigError(f"{where} lacks target_layer_ids and num_target_layers; add one.")
        ids = default_target_layers(int(layers), model.num_layers)
    return DFlashConfig(
        model=model,
        block_size=_number(inner.get("block_size", raw.get("block_size")), "block_size", where),
        target_layer_ids=tuple(map(int, ids)),
        mask_token_id=_optional(inner.get("mask_token_id")),
        mask_token=inner.get("mask_token"),
        num_target_layers=_optional(layers),
        target_hidden_size=model.hidden_size,
        draft_vocab_size=model.vocab_size,
        sample_from_anchor=bool(inner.get("sample_from_anchor", False)),
        sliding_non_causal=bool(raw.get("sliding_window_non_causal", False)),
    )


def _parse_speculators(raw: Mapping[str, Any], where: str) -> DFlashConfig:
    kind, head = raw["speculators_model_type"], raw.get("projector_type", "dflash")
    if kind != "dflash" or head != "dflash":
        raise ConfigError(
            f"{where} is a speculators {kind!r} model (projector {head!r}); expected a plain"
            " 'dflash' one."
        )
    if raw.get("shift_label"):
        raise ConfigError(f"{where}: shift_label is not supported; it must be false.")
    inner = dict(raw.get("transformer_layer_config") or {})
    inner.setdefault("architectures", ["DFlashDraftModel"])
    model = parse_model_config(inner, where=f"{where}, transformer_layer_config")
    ids = raw.get("aux_hidden_state_layer_ids")
    if not ids:
        raise ConfigError(f"{where} lacks aux_hidden_state_layer_ids.")
    return DFlashConfig(
        model=model,
        block_size=_number(raw.get("block_size"), "block_size", where),
        target_layer_ids=tuple(int(i) - 1 for i in ids),  # they count the embedding as 0
        mask_token_id=_optional(raw.get("mask_token_id")),
        mask_token=raw.get("mask_token"),
        num_target_layers=None,
        target_hidden_size=_optional(raw.get("target_hidden_size")) or model.hidden_size,
        draft_vocab_size=_optional(raw.get("draft_vocab_size")) or model.vocab_size,
        sample_from_anchor=bool(raw.get("sample_from_anchor", False)),
        sliding_non_causal=bool(raw.get("sliding_window_non_causal", False)),
    )


def default_target_layers(target: int, draft: int) -> tuple[int, ...]:
    """Evenly from 1 to `target` - 3, one per draft layer; the middle one for a single layer."""
    if draft == 1:
        return (target // 2,)
    return tuple(round(1 + i * (target - 4) / (draft - 1)) for i in range(draft))


def _check(config: DFlashConfig, where: str) -> None:
    check_layers(config.model)
    if config.block_size < 2:
        raise ConfigError(f"{where}: block_size must be at least 2, got {config.block_size}.")
    if config.mask_token_id is None and config.mask_token is None:
        raise ConfigError(f"{where} names no mask token: mask_token_id (or mask_token) is needed.")
    if not config.target_layer_ids:
        raise ConfigError(f"{where}: target_layer_ids is empty; name the layers the draft reads.")
    if min(config.target_layer_ids) < 0:
        raise ConfigError(f"{where}: target layer ids {config.target_layer_ids} start below 0.")
    if config.draft_vocab_size > config.vocab_size:
        raise ConfigError(
            f"{where}: draft_vocab_size {config.draft_vocab_size} is over the target's"
            f" {config.vocab_size}."
        )
    sliding = list(config.model.raw.get("layer_types") or ()).count("sliding_attention")
    if sliding and not any(config.model.windows):
        raise ConfigError(f"{where} has sliding_attention layers but no sliding_window.")


def _number(value: Any, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where}: {name} must be an integer, got {value!r}.")
    return value


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)
