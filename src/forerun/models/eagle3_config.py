"""Configs of EAGLE-3 drafts, of SpecForge and of speculators, and of P-EAGLE's.

P-EAGLE (arXiv 2602.01469) is an EAGLE-3 draft, mostly of several layers, that predicts all tokens
of a step in one pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from forerun.attention.base import LayerMask, Mask
from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig, parse_model_config
from forerun.config.schema import ConfigKeys, LayerId, Object, Size, Token, checked
from forerun.core.errors import ConfigError, OtherDraftError, shown
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_base import DraftConfig, draft_config_file

# SpecForge's layer is Llama's; vLLM and others write the second name into the same files.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "PEagleDraftModel")
# Tensors that only an EAGLE-3 draft has, after the layer's prefix; whatever its config calls it.
LAYER_PREFIXES = ("midlayer.", "layers.0.")
MASK_HIDDEN = "mask_hidden"  # of P-EAGLE
FUSE, NORM, QUERY_NORM = "fc.weight", "hidden_norm.weight", "self_attn.q_norm.weight"
KINDS = ("eagle3", "peagle")  # of speculators
PARALLEL = KINDS[1]
# Keys that change what the layers compute, and the value that is supported.
ONLY = {
    "bias": False,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "use_gemma_norm": False,
}
QK_NORM = {"llama": False, "qwen3": True}  # the layer's family, in speculators


class Eagle3Keys(msgspec.Struct):
    """What is read of either format, beside the layer's own keys."""

    speculators_model_type: str | None = None
    eagle_config: Object | None = None
    transformer_layer_config: Object | None = None
    eagle_aux_hidden_state_layer_ids: list[LayerId] | None = None
    use_aux_hidden_state: bool | None = None
    target_hidden_size: Size | None = None
    draft_vocab_size: Size | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    bias: bool | None = None
    parallel_drafting: bool | None = None
    mask_token_id: Token | None = None
    pard_token: Token | None = None
    ptd_token_id: Token | None = None
    is_neox_style: bool | None = None
    rope_is_neox_style: bool | None = None
    use_gemma_norm: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """A draft's shape; the same fields for both checkpoint formats."""

    aux_layer_ids: tuple[int, ...] | None  # decoder layers whose outputs it reads
    layer_prefix: str  # of the first layer's tensors
    qk_norm: bool
    norm_before_residual: bool  # the residual is the normed hidden state
    norm_before_fc: bool  # one RMSNorm over all auxiliary hidden states
    fc_norm: bool  # one RMSNorm per captured layer (EAGLE-3.1)
    norm_output: bool  # the next position reads the state after the final norm (EAGLE-3.1)
    mask_token_id: int | None = None  # of P-EAGLE, a parallel draft

    @property
    def num_aux_layers(self) -> int:
        return 3 if self.aux_layer_ids is None else len(self.aux_layer_ids)

    @property
    def layer_masks(self) -> tuple[LayerMask, ...]:
        return tuple(LayerMask(Mask.CAUSAL, window) for window in self.model.windows)

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
    path = draft_config_file(folder)
    stored = draft_tensors(folder).headers if any(folder.glob("*.safetensors")) else ()
    return parse_eagle3_config(read_json(path), str(path), stored)


def draft_tensors(folder: Path) -> Checkpoint:
    """The folder's tensors, without the `model.` that some writers put before them."""
    checkpoint = Checkpoint(folder)
    checkpoint.rename({"model.": ""})
    return checkpoint


def parse_eagle3_config(
    raw: Mapping[str, Any], where: str = "config", stored: Collection[str] = ()
) -> Eagle3Config:
    """`stored`: names of the checkpoint's tensors, by which a draft with a common name is known."""
    names = checked(ConfigKeys, raw, where).architectures or []
    outer = checked(Eagle3Keys, raw, where)
    read = checked(Eagle3Keys, {**raw, **(outer.eagle_config or {})}, where)
    found = [prefix for prefix in LAYER_PREFIXES if {FUSE, prefix + NORM} <= set(stored)]
    if outer.speculators_model_type is not None:
        config = _parse_speculators(outer, where)
    elif set(names) & set(ARCHITECTURES):
        config = _parse_specforge(raw, read, found[0] if found else LAYER_PREFIXES[0], where)
    elif found:  # community files say LlamaForCausalLM
        named = {**raw, "architectures": list(ARCHITECTURES[:1])}
        config = _parse_specforge(named, read, found[0], where)
        config = replace(config, qk_norm=found[0] + QUERY_NORM in stored)
    else:
        raise OtherDraftError(
            f"{where} is not an EAGLE-3 draft: its architecture is not {ARCHITECTURES[0]}"
            " (SpecForge), it has no speculators_model_type (speculators), and no tensors"
            f" {FUSE} and {LAYER_PREFIXES[0]}{NORM} are beside it."
        )
    if outer.speculators_model_type == PARALLEL or read.parallel_drafting or MASK_HIDDEN in stored:
        config = replace(config, mask_token_id=_mask_token(read, where))
    _check(config, read, where)
    return config


def _mask_token(read: Eagle3Keys, where: str) -> int:
    """Returns the token that a parallel draft reads where none is known."""
    keys = {
        "mask_token_id": read.mask_token_id,
        "pard_token": read.pard_token,
        "ptd_token_id": read.ptd_token_id,
    }
    given = {name: token for name, token in keys.items() if token is not None}
    if not given:
        raise ConfigError(
            f"{where}: a draft that predicts in parallel needs its mask token; {', '.join(keys)}"
            " are missing."
        )
    if len(set(given.values())) > 1:
        tokens = ", ".join(f"{name} {token}" for name, token in given.items())
        raise ConfigError(f"{where}: the mask tokens differ: {tokens}; correct config.json.")
    return next(iter(given.values()))


def _parse_specforge(
    raw: Mapping[str, Any], read: Eagle3Keys, prefix: str, where: str
) -> Eagle3Config:
    if read.use_aux_hidden_state is False:
        raise ConfigError(
            f"{where}: use_aux_hidden_state is false, so the draft reads the target's last layer"
            " only; such drafts are not supported."
        )
    model = parse_model_config(raw, where=where)
    ids = read.eagle_aux_hidden_state_layer_ids
    return _config(read, model, tuple(ids) if ids else None, prefix)


def _parse_speculators(read: Eagle3Keys, where: str) -> Eagle3Config:
    kind = read.speculators_model_type
    if kind not in KINDS:
        raise OtherDraftError(
            f"{where} is a speculators {shown(kind)} model; expected"
            f" {' or '.join(map(repr, KINDS))}."
        )
    inner = {"architectures": ["Eagle3Speculator"], **(read.transformer_layer_config or {})}
    model = parse_model_config(inner, where=f"{where}, transformer_layer_config")
    family = inner.get("model_type", "llama")
    if family not in QK_NORM:
        raise ConfigError(
            f"{where}: a draft layer of the family {shown(family)} is not supported; known:"
            f" {', '.join(QK_NORM)}."
        )
    ids = read.eagle_aux_hidden_state_layer_ids
    layers = tuple(i - 1 for i in ids) if ids else None  # they count the embedding as 0
    config = _config(read, model, layers, LAYER_PREFIXES[1])
    return replace(config, qk_norm=QK_NORM[family])


def _config(
    read: Eagle3Keys, model: ModelConfig, layers: tuple[int, ...] | None, prefix: str
) -> Eagle3Config:
    return Eagle3Config(
        model=model,
        aux_layer_ids=layers,
        target_hidden_size=read.target_hidden_size or model.hidden_size,
        draft_vocab_size=read.draft_vocab_size or model.vocab_size,
        layer_prefix=prefix,
        qk_norm=False,
        norm_before_residual=bool(read.norm_before_residual),
        norm_before_fc=bool(read.norm_before_fc),
        fc_norm=bool(read.fc_norm),
        norm_output=bool(read.norm_output),
    )


def _check(config: Eagle3Config, read: Eagle3Keys, where: str) -> None:
    config.check_sizes(config.aux_layer_ids or (), where)
    for key, only in ONLY.items():
        value = getattr(read, key)
        if value not in (None, only):
            raise ConfigError(f"{where}: {key} {value} is not supported; it must be {only}.")
    mask = config.mask_token_id
    if mask is not None and mask >= config.vocab_size:
        raise ConfigError(
            f"{where}: the mask token {mask} is outside the vocabulary of {config.vocab_size}."
        )
