"""The DFlash draft: a few Qwen3 layers that fill a block of masks in one pass (arXiv 2602.06036).

Every block row attends to the whole block and to context K/V, which the draft makes itself from
the target's hidden states: C = hidden_norm(fc(features)) goes raw, without an input norm, into the
k and v projections of every layer. Reads the checkpoints of z-lab and of speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionContext,
    KVNormRope,
    LayerMask,
    Mask,
    RopeInput,
)
from forerun.config.model_config import ModelConfig, parse_model_config, read_json
from forerun.core.errors import ConfigError
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms, rotate
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.models.checkpoint import DUMMY_FORMATS, Checkpoint, fill_dummy
from forerun.models.decoder import Decoder
from forerun.models.draft_vocab import UNUSED, OwnParts, check_offsets, own_parts
from forerun.models.loader import HARMLESS
from forerun.models.registry import check_layers


@dataclass(frozen=True)
class DFlashConfig:
    """A draft's shape and how it was trained; the same fields for both checkpoint formats."""

    model: ModelConfig
    block_size: int  # rows of a block, the newest token's among them
    target_layer_ids: tuple[int, ...]  # decoder layers whose outputs are the features
    mask_token_id: int | None  # None: only the string is known
    mask_token: str | None  # for the tokenizer to look up
    num_target_layers: int | None  # layers of the target it was trained for, if stated
    target_hidden_size: int
    draft_vocab_size: int  # less than the target's vocabulary where it is pruned
    sample_from_anchor: bool  # row 0 predicts too; then row j predicts position start + j + 1
    sliding_non_causal: bool  # sliding layers see the whole block, as full ones do

    @property
    def num_drafts(self) -> int:
        """K: tokens a full block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def feature_size(self) -> int:
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

    def layer_masks(self, window: int | None = None) -> tuple[LayerMask, ...]:
        """One a layer; `window` limits every layer's context, if training did not limit it more."""
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
    """Layers spread evenly from 1 to `target` - 3, one a draft layer; the middle one for one."""
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


class ContextPrologue(KVNormRope):
    """Norm and rope over all layers' k heads at once."""

    def __init__(self, kv_heads: int, norms: HeadNorms) -> None:
        self.norms = norms
        self.layers, self.dim = norms.k.shape
        stacked = norms.k.repeat_interleave(kv_heads, 0)
        self.norm = RMSNorm.of(stacked, norms.eps)

    def split(self, product: Tensor, rope: RopeInput) -> list[tuple[Tensor, Tensor]]:
        k, v = product.view(product.shape[0], -1, self.dim).chunk(2, 1)
        k = rotate(self.norm(k), rope.cos_sin)
        return list(zip(k.chunk(self.layers, 1), v.chunk(self.layers, 1), strict=True))


class DFlashDraft:
    """The draft's layers, and the path that makes context K/V.

    `embedding` [V, H], `head` and `d2t` are the draft's own where the checkpoint has them, else
    None: then the target's embedding and head serve.
    """

    def __init__(
        self,
        config: DFlashConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        window: int | None = None,
        own: frozenset[str] = frozenset(),
    ) -> None:
        """`own`: names among `embed_tokens.weight`, `lm_head.weight`, `d2t`."""
        model = config.model
        self.config, self.layer_masks = config, config.layer_masks(window)
        self.decoder = Decoder(model, self.layer_masks, True, max_positions, dtype, device)
        self.fc = Linear(config.feature_size, model.hidden_size, dtype, device)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype, device)

        sizes = model.vocab_size, config.draft_vocab_size, model.hidden_size
        self._own = parts = OwnParts(own, *sizes, dtype, device)
        self.embedding, self.head, self.d2t = parts.embedding, parts.head, parts.d2t

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view it is copied into."""
        out = {"fc.weight": self.fc.weight, "hidden_norm.weight": self.hidden_norm.weight}
        return out | self.decoder.weights("") | self._own.weights()

    def prepare(self) -> None:
        """After the weights are in. Copies every layer's k and v rows into one matrix first."""
        attentions = [layer.attention for layer in self.decoder.layers]
        parts = [a.qkv.weight.split_with_sizes(a.sizes) for a in attentions]
        weight = torch.cat([p[1] for p in parts] + [p[2] for p in parts])  # all k, then all v
        biases = [
            a.qkv.bias.split_with_sizes(a.sizes) for a in attentions if a.qkv.bias is not None
        ]
        bias = torch.cat([b[1] for b in biases] + [b[2] for b in biases]) if biases else None
        norms = [a.norms for a in attentions if a.norms is not None]
        keys = HeadNorms(norms[0].q, torch.stack([n.k for n in norms]), norms[0].eps)
        self._prologue = ContextPrologue(self.config.num_kv_heads, keys)
        self._context_kv = Linear.of(weight, bias)
        for linear in (self._context_kv, self.fc, *([self.head] if self.head else [])):
            linear.pack()
        self.hidden_norm.prepare()
        self.decoder.prepare()

    def context(self, features: Tensor) -> Tensor:
        """Target features [T, n * H_t] -> C [T, H]."""
        return self.hidden_norm(self.fc(features))

    def write_context(
        self, features: Tensor, positions: Tensor, ctx: AttentionContext, new: Tensor | None
    ) -> None:
        """Stores every layer's context K/V of the rows at absolute `positions` [T].

        One product makes k and v of all layers. `new` as in `rope_write_layers`.
        """
        kv = self._context_kv(self.context(features))
        ctx.write_layers(kv, self._prologue, self.decoder.rope.rows(positions), new)

    def forward(self, x: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """Embedded block rows x [T, H] -> hidden [T, H] after the final norm."""
        return self.decoder.run(x, positions, ctx)[0]

    def target_ids(self, ids: Tensor) -> Tensor:
        """Draft vocabulary ids -> the target's, int64, any shape."""
        return ids if self.d2t is None else ids + self.d2t[ids]


def load_draft(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    window: int | None = None,
    load_format: str = "auto",
) -> DFlashDraft:
    """Builds and fills a draft.

    Args:
        window: context positions it attends to (None: all).
        load_format: "auto", or one of `DUMMY_FORMATS`: random weights, a config is enough.

    Raises:
        ConfigError: anything missing, broken or unsupported, in one line with the fix.
    """
    config = load_dflash_config(folder)
    if load_format in DUMMY_FORMATS:
        draft = DFlashDraft(config, dtype, device, max_positions, window)
        fill_dummy(draft.weights(), load_format)
        draft.prepare()
        return draft
    checkpoint = Checkpoint(folder)
    own = own_parts(checkpoint, config.draft_vocab_size, config.vocab_size)
    draft = DFlashDraft(config, dtype, device, max_positions, window, own)
    checkpoint.read_into(
        draft.weights(), (*HARMLESS, *UNUSED), hint="Is config.json the one of these weights?"
    )
    check_offsets(folder, draft.d2t, config.vocab_size)
    draft.prepare()
    return draft
