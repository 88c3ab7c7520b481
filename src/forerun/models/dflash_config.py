"""Configs of DFlash drafts, of z-lab and of speculators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.attention.base import LayerMask, Mask
from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig, parse_model_config
from forerun.config.schema import checked
from forerun.core.errors import ConfigError, OtherDraftError, shown
from forerun.models.block_convolution import ConvolutionConfig
from forerun.models.dflash_keys import (
    ARCHITECTURES,
    BODY,
    FOLDERS,
    HARMLESS,
    ONLY,
    UNSUPPORTED,
    DFlashKeys,
    OuterKeys,
)
from forerun.models.dflash_tensors import named_tensors
from forerun.models.draft_base import DraftConfig, draft_config_file
from forerun.models.heads.base import BodySizes, HeadConfig, agreed
from forerun.models.heads.registry import (
    HEAD_KEYS,
    SPECULATORS,
    looks_like_head_key,
    named_head,
    predicts_from_anchor,
    read_head,
)

KNOWN = {*DFlashKeys.__struct_fields__, *ONLY, *HEAD_KEYS, "projector_type"}


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DraftConfig):
    """A draft's shape and how it was trained; the same fields for both checkpoint formats."""

    partial_rotary = True

    block_size: int  # tokens of a block, the last sampled one among them
    target_layer_ids: tuple[int, ...]  # decoder layers whose outputs it reads
    mask_token_id: int | None  # None: only the string is known
    mask_token: str | None  # for the tokenizer to look up
    num_target_layers: int | None  # layers of the target it was trained for, if stated
    sample_from_anchor: bool  # token 0 predicts too; then token j predicts position start + j + 1
    # Per layer: tokens of a block see those before them in it, and not all of it.
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]  # per layer, as in `ModelConfig`
    # A window of layers that are not causal lies before the block, for all its tokens; else it is
    # around each token.
    windows_before_block: bool = False
    rope_interleaved: bool = False  # neighbouring dims are rotated, not halves of a head
    unit_offset_norms: bool = False  # files have w - 1 of the body's norms, as Gemma's
    value_scale: float = 1.0  # values are multiplied by it, of context and block
    sinks: tuple[bool, ...] = ()  # per layer: a logit per head without a value
    convolution: ConvolutionConfig | None = None  # around the sublayers, over a block's rows
    embedding_scale: float = 1.0  # of a block's embeddings, not of the context
    head: HeadConfig | None = None  # None: each row's most likely token
    layout_contradicts: bool = False  # a user has chosen another layout than the files'

    @property
    def num_drafts(self) -> int:
        """K: tokens that a full block proposes."""
        return self.drafts_of(self.block_size)

    @property
    def body_sizes(self) -> BodySizes:
        """What its head is built for."""
        model = self.model
        vocab = model.vocab_size, self.draft_vocab_size
        return BodySizes(model.hidden_size, *vocab, self.block_size, model.rms_norm_eps)

    def in_layout(self, from_anchor: bool) -> DFlashConfig:
        """The same draft, served in a layout that a user has chosen.

        Raises:
            ConfigError: its head has another one only.
        """
        if self.head is not None and self.head.fill_in_only and from_anchor:
            raise ConfigError(
                f"A {self.head.files.name} draft predicts in the fill-in layout only; drop"
                " speculative_draft_layout."
            )
        contradicts = from_anchor is not self.sample_from_anchor
        return replace(self, sample_from_anchor=from_anchor, layout_contradicts=contradicts)

    def drafts_of(self, rows: int) -> int:
        """Tokens that a block of `rows` rows proposes."""
        last = self.head is None or self.head.last_row_predicts
        return rows if self.sample_from_anchor and last else rows - 1

    @property
    def num_aux_layers(self) -> int:
        return len(self.target_layer_ids)

    @property
    def can_be_cut(self) -> bool:
        """Whether the first rows of a block are the same without those after them."""
        fixed = self.convolution is not None or (self.head is not None and self.head.fixed_block)
        return all(self.causal) and not fixed

    def layer_masks(self, window: int | None = None) -> tuple[LayerMask, ...]:
        """One per layer; `window` limits each context further than training did."""
        masks = []
        for causal, trained in zip(self.causal, self.windows, strict=True):
            limits = [size for size in (trained, window) if size is not None]
            around = trained is not None and not self.windows_before_block
            kind = Mask.CAUSAL if causal else Mask.SLIDING_BLOCK if around else Mask.BLOCK
            masks.append(LayerMask(kind, min(limits, default=None)))
        return tuple(masks)

    def describe(self) -> str:
        """How the checkpoint is read, for the log: what is silently wrong if it is misread."""
        first = "the last token" if self.sample_from_anchor else "the first mask"
        kinds = dict.fromkeys(
            ("causal" if causal else "bidirectional") + (f" within {window}" if window else "")
            for causal, window in zip(self.causal, self.windows, strict=True)
        )
        extras = f", values x {self.value_scale:g}" if self.value_scale != 1 else ""
        extras += ", attention sinks" if any(self.sinks) else ""
        extras += ", convolutions" if self.convolution is not None else ""
        head = "no head" if self.head is None else self.head.describe()
        layout = "anchor-first" if self.sample_from_anchor else "fill-in"
        return (
            f"{head}, {layout} blocks of {self.block_size} tokens, predictions from {first} on,"
            " attention"
            f" {' and '.join(kinds)}{extras}, target layers {list(self.target_layer_ids)}"
        )


def load_dflash_config(folder: Path) -> DFlashConfig:
    """Reads a draft's `config.json`, of either format, and what it leaves open of its tensors.

    Raises:
        ConfigError: not a DFlash draft, or a field missing or out of range.
    """
    path = draft_config_file(folder)
    config = parse_dflash_config(read_json(path), where=str(path))
    if config.head is None or not any(folder.glob("*.safetensors")):
        return config
    headers = named_tensors(folder, config.head).headers
    return replace(config, head=config.head.with_tensors(headers, config.body_sizes))


def parse_dflash_config(raw: Mapping[str, Any], where: str = "config") -> DFlashConfig:
    outer = checked(OuterKeys, raw, where)
    inner = _given(outer.inner)
    keys = _merged(_given(raw), inner, where)
    _check_body(outer, where)
    head = read_head(keys, where)
    names = outer.architectures or (list(ARCHITECTURES[:1]) if inner else [])
    _check_kind(outer, keys, names, head, where)
    _refuse_unknown(inner, keys, head, where)
    body: Mapping[str, Any] = {**raw, "architectures": names}
    body_where = where
    if outer.speculators_model_type is not None:
        body = {"architectures": list(ARCHITECTURES[:1]), **(outer.transformer_layer_config or {})}
        body_where = f"{where}, transformer_layer_config"
    _check_ropes(body, body_where)
    model = parse_model_config(body, where=body_where)
    read = checked(DFlashKeys, keys, where)
    if read.block_size is None:
        raise ConfigError(f"{where} lacks block_size: tokens of a block. Add it.")
    windows = _windows(read, model, where)
    convolution = _convolution(read, keys, head, model, where)
    config = DFlashConfig(
        model=model,
        block_size=read.block_size,
        target_layer_ids=_target_layers(read, where),
        mask_token_id=read.mask_token_id,
        mask_token=read.mask_token,
        num_target_layers=read.num_target_layers,
        target_hidden_size=read.target_hidden_size or model.hidden_size,
        draft_vocab_size=read.draft_vocab_size or model.vocab_size,
        sample_from_anchor=_predicts_from_anchor(read, keys, head, where),
        causal=_causal(read, windows, convolution, head),
        windows=windows,
        windows_before_block=any(windows) and outer.speculators_model_type is not None,
        rope_interleaved=_rope_is_interleaved(read, where),
        unit_offset_norms=bool(read.use_gemma_norm),
        value_scale=read.attention_value_scale or 1.0,
        sinks=_sinks(read, windows),
        convolution=convolution,
        embedding_scale=read.input_embedding_scale or 1.0,
        head=head,
    )
    _check(config, where)
    return config


def keys_not_read(raw: Mapping[str, Any]) -> list[str]:
    """Keys of a DFlash draft's `config.json` that mean nothing to Forerun, by name."""
    own = {*OuterKeys.__struct_fields__, *KNOWN}
    inner = _given(raw.get("transformer_layer_config") or {})
    layers = {f"transformer_layer_config.{key}" for key in inner if key not in (*BODY, *HARMLESS)}
    return sorted(layers | (_given(raw).keys() - own - {*BODY, *HARMLESS}))


def _given(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


def _merged(outer: Mapping[str, Any], inner: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of both levels: writers differ in where they put them, and readers take either."""
    for key in inner:
        if key in outer and outer[key] != inner[key]:
            raise ConfigError(
                f"{where}: {key} is {shown(outer[key])} at the top and {shown(inner[key])} in"
                " dflash_config. Remove the wrong one."
            )
    return {key: outer[key] for key in outer if key not in FOLDERS} | dict(inner)


def _check_ropes(body: Mapping[str, Any], where: str) -> None:
    """Refuses values beside `rope_parameters` (transformers 5) that differ from it: readers differ
    in which of them they take.
    """
    newer = body.get("rope_parameters")
    if not isinstance(newer, Mapping) or any(isinstance(each, Mapping) for each in newer.values()):
        return
    newer = {"rope_type": newer.get("type", "default"), **newer}
    older = body.get("rope_scaling")
    older = _given(older) if isinstance(older, Mapping) else {}
    older = {"rope_type" if key == "type" else key: value for key, value in older.items()}
    for key, value in _given({"rope_theta": body.get("rope_theta"), **older}).items():
        if newer.get(key, value) != value:
            raise ConfigError(
                f"{where}: {key} is {shown(newer[key])} in rope_parameters and {shown(value)}"
                " beside it. Remove the wrong one."
            )


def _check_body(outer: OuterKeys, where: str) -> None:
    """Raises ConfigError where its layers are others than Qwen3's."""
    for name in outer.architectures or ():
        if name in UNSUPPORTED:
            raise ConfigError(
                f"{where}: {UNSUPPORTED[name]} ({name}) is not supported. Use another draft for"
                " this target."
            )


def _check_kind(
    outer: OuterKeys,
    keys: Mapping[str, Any],
    names: Sequence[str],
    head: HeadConfig | None,
    where: str,
) -> None:
    """Whether it is a DFlash draft, as far as it says what it is."""
    kind = outer.speculators_model_type
    if kind is not None:
        if kind.lower() not in SPECULATORS:
            raise OtherDraftError(
                f"{where} is a speculators {shown(kind)} model; expected"
                f" {' or '.join(map(repr, SPECULATORS))}."
            )
        return
    named = head is not None or named_head(keys) is not None
    known = named or bool(set(names) & set(ARCHITECTURES))
    if outer.dflash_config is None and not known:
        raise OtherDraftError(
            f"{where} is not a DFlash draft: it has neither dflash_config (z-lab) nor"
            " speculators_model_type (speculators)."
        )
    if not known and not all(name.endswith("ForCausalLM") for name in names):
        raise ConfigError(
            f"{where}: architectures {', '.join(map(shown, names))} is not known; plain DFlash"
            f" drafts are {ARCHITECTURES[0]}. A head that it may have would be left out."
        )


def _refuse_unknown(
    inner: Mapping[str, Any], keys: Mapping[str, Any], head: HeadConfig | None, where: str
) -> None:
    """What a key of `dflash_config` means must be known, and what one of a head means anywhere; at
    the top stand many others' keys.
    """
    asked = [key for key in keys if key in inner or looks_like_head_key(key)]
    unknown = [key for key in asked if key not in KNOWN]
    if unknown:
        has = "dflash_config has" if any(key in inner for key in unknown) else "it has"
        raise ConfigError(
            f"{where}: {has} the unknown {', '.join(map(shown, unknown))}. A draft that is served"
            " without what they mean has hardly a token accepted; remove them if they mean nothing"
            " for serving."
        )
    honoured = () if head is None else head.honours
    for key, values in ONLY.items():
        if key in keys and keys[key] not in values and key not in honoured:
            must = f"it must be {' or '.join(map(shown, values))}" if values else "remove it"
            raise ConfigError(f"{where}: {key} {shown(keys[key])} is not supported; {must}.")
    projector = keys.get("projector_type")
    if head is None and named_head(keys) is None and projector not in (None, "dflash"):
        raise ConfigError(f"{where}: projector_type {shown(projector)} is not known.")


def _target_layers(read: DFlashKeys, where: str) -> tuple[int, ...]:
    """Reads whichever keys name them. No rule is guessed: publishers' files do not follow one."""
    ids = [tuple(read.target_layer_ids)] if read.target_layer_ids is not None else []
    ids += [tuple(i - 1 for i in counted) for counted in read.layers_from_1]
    if not ids:
        raise ConfigError(
            f"{where} lacks dflash_config.target_layer_ids (aux_hidden_state_layer_ids in"
            " speculators' files): the target's layers that the draft was trained to read. Add"
            " them; with other layers hardly a draft is accepted."
        )
    if len(set(ids)) > 1:
        raise ConfigError(
            f"{where}: target_layer_ids {list(ids[0])} and aux_hidden_state_layer_ids (less 1)"
            f" {list(ids[1])} disagree. Remove the wrong one."
        )
    return ids[0]


def _windows(read: DFlashKeys, model: ModelConfig, where: str) -> tuple[int | None, ...]:
    """Layers slide that `layer_types` says do; with `use_swa` and none of these, all do."""
    types = model.raw.get("layer_types")
    sliding = [window is not None for window in model.windows]
    if types is not None:
        sliding = [kind == "sliding_attention" for kind in types]
    if read.use_swa and not any(sliding):
        sliding = [True] * model.num_layers
    window = read.sliding_window or model.raw.get("sliding_window") or read.swa_window_size
    if read.use_swa:
        window = read.swa_window_size or window
    if any(sliding) and not window:
        raise ConfigError(
            f"{where} has sliding_attention layers but no sliding_window (swa_window_size)."
        )
    return tuple(window if slides else None for slides in sliding)


def _causal(
    read: DFlashKeys,
    windows: Sequence[int | None],
    convolution: ConvolutionConfig | None,
    head: HeadConfig | None,
) -> tuple[bool, ...]:
    """Stated for all layers; else sliding layers are causal within a block, and full ones not.

    DFlash2's, known by its convolutions or its head, are not, whoever wrote the file.
    """
    stated = read.causal if read.is_causal is None else read.is_causal
    if stated is not None:
        return (stated,) * len(windows)
    non_causal = read.sliding_window_non_causal
    if non_causal is None:
        non_causal = convolution is not None or (head is not None and not head.causal_windows)
    return tuple(window is not None and not non_causal for window in windows)


def _rope_is_interleaved(read: DFlashKeys, where: str) -> bool:
    stated = {
        "is_neox_style": read.is_neox_style,
        "rope_is_neox_style": read.rope_is_neox_style,
    }
    return agreed(stated, where) is False


def _sinks(read: DFlashKeys, windows: Sequence[int | None]) -> tuple[bool, ...]:
    of_sliding = bool(read.attention_sink_bias or read.add_swa_attention_sink_bias)
    of_full = bool(read.attention_sink_bias or read.add_full_attention_sink_bias)
    return tuple(of_full if window is None else of_sliding for window in windows)


def _convolution(
    read: DFlashKeys,
    keys: Mapping[str, Any],
    head: HeadConfig | None,
    model: ModelConfig,
    where: str,
) -> ConvolutionConfig | None:
    """The convolutions around the sublayers, from two keys that belong together."""
    taps, group = read.conv_kernel_size, read.conv_group_size
    default = None if head is None else head.convolution(keys)
    if default is not None:
        taps, group = taps or default.kernel_size, group or default.group_size
    if not taps and not group:
        return None
    if not taps or not group:
        raise ConfigError(f"{where} needs both conv_kernel_size and conv_group_size, as trained.")
    if model.hidden_size % group:
        raise ConfigError(
            f"{where}: conv_group_size {group} does not divide the hidden size {model.hidden_size}."
        )
    return ConvolutionConfig(taps, group)


def _predicts_from_anchor(
    read: DFlashKeys, keys: Mapping[str, Any], head: HeadConfig | None, where: str
) -> bool:
    """Whether the first token of a block predicts the next one; else it is only read."""
    stated = {
        "sample_from_anchor": read.sample_from_anchor,
        "query_zero_predicts_next": read.query_zero_predicts_next,
    }
    said = agreed(stated, where)
    if said is None:
        stated, said = {"shift_label": read.shift_label}, read.shift_label
    if said and head is not None and head.fill_in_only:
        key = next(key for key, value in stated.items() if value)
        raise ConfigError(
            f"{where}: {key} is true, but a {head.files.name} draft predicts in the fill-in layout"
            " only. Set it to false."
        )
    return predicts_from_anchor(keys, head) if said is None else said


def _check(config: DFlashConfig, where: str) -> None:
    config.check_sizes(config.target_layer_ids, where)
    if config.head is not None:
        config.head.check(config.body_sizes, where)
    if config.mask_token_id is None and config.mask_token is None:
        raise ConfigError(f"{where} names no mask token: mask_token_id (or mask_token) is needed.")
    if not config.target_layer_ids:
        raise ConfigError(f"{where}: target_layer_ids is empty; name the layers the draft reads.")
