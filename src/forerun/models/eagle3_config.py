"""Configs of EAGLE-3 drafts, of SpecForge and of speculators."""

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

# SpecForge's layer is Llama's; vLLM and others write the second name into the same files.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
QK_NORM = {"llama": False, "qwen3": True}  # the layer's family, in speculators


@dataclass(frozen=True)
class Eagle3Config:
    """A draft's shape; the same fields for both checkpoint formats."""

    model: ModelConfig  # one layer; its vocabulary is the target's
    aux_layer_ids: tuple[int, ...] | None  # decoder layers whose outputs it reads
    target_hidden_size: int
    draft_vocab_size: int  # smaller than the target's if it is pruned
    layer_prefix: str  # of the layer's tensors
    qk_norm: bool
    norm_before_residual: bool  # the residual is the normed hidden state
    norm_before_fc: bool  # one RMSNorm over all auxiliary hidden states
    fc_norm: bool  # one RMSNorm per captured layer (EAGLE-3.1)
    norm_output: bool  # the next position reads the state after the final norm (EAGLE-3.1)

    @property
    def num_aux_layers(self) -> int:
        return 3 if self.aux_layer_ids is None else len(self.aux_layer_ids)

    @property
    def aux_hidden_size(self) -> int:
        return self.num_aux_layers * self.target_hidden_size

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def num_heads(self) -> int:
        return self.model.num_heads

    @property
    def layer_masks(self) -> tuple[LayerMask, ...]:
        return (LayerMask(Mask.CAUSAL, self.model.windows[0]),)

    def kv_layout(self, kv_dtype: torch.dtype, comm: Communicator = SINGLE_RANK) -> ModelLayout:
        """What the layer keeps on a rank."""
        return dense_layout(self.model, 1, kv_dtype, comm)

    def target_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Decoder layers of such a target whose outputs `combine_hidden_states` reads, in order.

        Raises:
            ConfigError: the target has no such layers.
        """
        ids = self.aux_layer_ids or default_target_layers(num_target_layers)
        if not 0 <= min(ids) <= max(ids) < num_target_layers:
            raise ConfigError(
                f"The draft reads the outputs of target layers {ids}, but the target has"
                f" {num_target_layers} layers. Use the draft that was trained for this target."
            )
        return ids


def default_target_layers(target: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer: the inputs of layers 2, target / 2 and target - 3."""
    return 1, target // 2 - 1, target - 4


def load_eagle3_config(folder: Path) -> Eagle3Config:
    """Reads a draft's `config.json`, of either format.

    Raises:
        ConfigError: not an EAGLE-3 draft, or a field missing or out of range.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; give the path of the draft model's folder, or org/name of"
            " one on the Hub."
        )
    path = folder / "config.json"
    return parse_eagle3_config(read_json(path), where=str(path))


def parse_eagle3_config(raw: Mapping[str, Any], where: str = "config") -> Eagle3Config:
    if "speculators_model_type" in raw:
        config = _parse_speculators(raw, where)
    elif set(raw.get("architectures") or ()) & set(ARCHITECTURES):
        config = _parse_specforge(raw, where)
    else:
        raise ConfigError(
            f"{where} is not an EAGLE-3 draft: its architecture is not {ARCHITECTURES[0]}"
            " (SpecForge) and it has no speculators_model_type (speculators)."
        )
    _check(config, raw, where)
    return config


def _parse_specforge(raw: Mapping[str, Any], where: str) -> Eagle3Config:
    inner: Mapping[str, Any] = raw.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state") is False:
        raise ConfigError(
            f"{where}: use_aux_hidden_state is false, so the draft reads the target's last layer"
            " only; such drafts are not supported."
        )
    model = parse_model_config(raw, where=where)
    ids = inner.get("eagle_aux_hidden_state_layer_ids")
    return _config(
        {**raw, **inner}, model, tuple(map(int, ids)) if ids else None, "midlayer.", False
    )


def _parse_speculators(raw: Mapping[str, Any], where: str) -> Eagle3Config:
    kind = raw["speculators_model_type"]
    if kind != "eagle3":
        raise ConfigError(f"{where} is a speculators {kind!r} model; expected 'eagle3'.")
    inner = dict(raw.get("transformer_layer_config") or {})
    inner.setdefault("architectures", ["Eagle3Speculator"])
    model = parse_model_config(inner, where=f"{where}, transformer_layer_config")
    family = inner.get("model_type", "llama")
    if family not in QK_NORM:
        raise ConfigError(
            f"{where}: a draft layer of the family {family!r} is not supported; known:"
            f" {', '.join(QK_NORM)}."
        )
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(int(i) - 1 for i in ids) if ids else None  # they count the embedding as 0
    return _config(raw, model, layers, "layers.0.", QK_NORM[family])


def _config(
    raw: Mapping[str, Any],
    model: ModelConfig,
    layers: tuple[int, ...] | None,
    prefix: str,
    qk_norm: bool,
) -> Eagle3Config:
    return Eagle3Config(
        model=model,
        aux_layer_ids=layers,
        target_hidden_size=int(raw.get("target_hidden_size") or model.hidden_size),
        draft_vocab_size=int(raw.get("draft_vocab_size") or model.vocab_size),
        layer_prefix=prefix,
        qk_norm=qk_norm,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
    )


def _check(config: Eagle3Config, raw: Mapping[str, Any], where: str) -> None:
    check_layers(config.model)
    if config.model.num_layers != 1:
        raise ConfigError(
            f"{where}: a draft of {config.model.num_layers} layers is not supported; it must be 1."
        )
    if raw.get("bias") or raw.get("parallel_drafting"):
        name = "bias" if raw.get("bias") else "parallel_drafting"
        raise ConfigError(f"{where}: {name} is not supported; it must be false.")
    if config.aux_layer_ids is not None and min(config.aux_layer_ids) < 0:
        raise ConfigError(f"{where}: target layer ids {config.aux_layer_ids} start below 0.")
    if config.draft_vocab_size > config.vocab_size:
        raise ConfigError(
            f"{where}: draft_vocab_size {config.draft_vocab_size} is over the target's"
            f" {config.vocab_size}."
        )
