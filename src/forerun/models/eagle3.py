"""The EAGLE-3 draft: one decoder layer that reads a token and a hidden state (arXiv 2503.01840).

The row at position p holds a hidden state of p and the token at p + 1, and predicts the token at
p + 2. Where the target has run, the hidden state is fc(its features at p); further ahead it is what
the draft's own layer gave at p - 1. The attention reads [norm(embedding) | norm(hidden)], of width
2H; the residual is the hidden state. Reads the checkpoints of SpecForge and of speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.model_config import ModelConfig, parse_model_config, read_json
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.attention import Attention
from forerun.layers.linear import Linear
from forerun.layers.mlp import MLP
from forerun.layers.norm import RMSNorm
from forerun.layers.rope import Rope
from forerun.models.checkpoint import DUMMY_FORMATS, Checkpoint, fill_dummy
from forerun.models.decoder import join, join_whole
from forerun.models.draft_vocab import (
    OWN_EMBEDDING,
    OWN_HEAD,
    UNUSED,
    OwnParts,
    check_offsets,
    own_parts,
)
from forerun.models.loader import HARMLESS
from forerun.models.registry import check_layers

Rows = Callable[[Tensor], Tensor]

# SpecForge's layer is Llama's; vLLM and others write the second name into the same files.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
QK_NORM = {"llama": False, "qwen3": True}  # the layer's family, in speculators


@dataclass(frozen=True)
class Eagle3Config:
    """A draft's shape; the same fields for both checkpoint formats."""

    model: ModelConfig  # one layer; its vocabulary is the target's
    aux_layer_ids: tuple[int, ...] | None  # decoder layers whose outputs are the features
    target_hidden_size: int
    draft_vocab_size: int  # less than the target's vocabulary where it is pruned
    layer_prefix: str  # of the layer's tensors
    qk_norm: bool
    norm_before_residual: bool  # the residual is the normed hidden state
    norm_before_fc: bool  # one RMSNorm over all features
    fc_norm: bool  # one RMSNorm a feature layer (EAGLE-3.1)
    norm_output: bool  # what later rows read is after the final norm (EAGLE-3.1)

    @property
    def num_aux_layers(self) -> int:
        return 3 if self.aux_layer_ids is None else len(self.aux_layer_ids)

    @property
    def feature_size(self) -> int:
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

    def kv_layout(self, dtype: torch.dtype) -> ModelLayout:
        return ModelLayout.dense(1, self.model.num_kv_heads, self.model.head_dim, dtype)

    def target_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Decoder layers of a target of that depth whose outputs `fuse` reads, in this order.

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


class Eagle3Draft:
    """One layer, the projection of the target's features, a head.

    `draft_tokens_of_columns` [V_d] int64: the target's id of every column of the logits.
    """

    def __init__(
        self,
        config: Eagle3Config,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        embed: Rows,
        lm_head: Rows,
        own: frozenset[str] = frozenset(),
    ) -> None:
        """Weights are uninitialised until a loader fills them; then `prepare`.

        Args:
            embed, lm_head: the target's, where the draft has none.
            own: names among `embed_tokens.weight`, `lm_head.weight`, `d2t`.
        """
        model, hidden = config.model, config.hidden_size
        self.config, self.layer_masks = config, config.layer_masks
        self.attention = Attention(
            model, 0, self.layer_masks[0], config.qk_norm, dtype, device, inputs=2 * hidden
        )
        self.mlp = MLP(model, dtype, device)
        self.fc = Linear(config.feature_size, hidden, dtype, device)
        self.rope = Rope(model.rope, model.head_dim, max_positions, dtype, device)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, model.rms_norm_eps, dtype, device)

        self.input_norm, self.hidden_norm, self.post_norm, self.norm = (
            norm(hidden) for _ in range(4)
        )
        self.features_norm = norm(config.feature_size) if config.norm_before_fc else None
        count = config.num_aux_layers if config.fc_norm else 0
        self.fc_norms = [norm(config.target_hidden_size) for _ in range(count)]

        sizes = config.vocab_size, config.draft_vocab_size, hidden
        self._own = parts = OwnParts(own, *sizes, dtype, device)
        self.embedding, self.head, self.d2t = parts.embedding, parts.head, parts.d2t
        self.draft_tokens_of_columns = torch.arange(config.draft_vocab_size, device=device)
        self._target_embed, self._target_head = embed, lm_head

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view it is copied into."""
        p = self.config.layer_prefix
        norms = {
            f"{p}input_layernorm": self.input_norm,
            f"{p}hidden_norm": self.hidden_norm,
            f"{p}post_attention_layernorm": self.post_norm,
            "norm": self.norm,
            **{f"fc_norm.{i}": norm for i, norm in enumerate(self.fc_norms)},
        }
        if self.features_norm is not None:
            norms["input_norm"] = self.features_norm
        return {
            "fc.weight": self.fc.weight,
            **self.attention.weights(f"{p}self_attn."),
            **self.mlp.weights(f"{p}mlp."),
            **{f"{name}.weight": norm.weight for name, norm in norms.items()},
            **self._own.weights(),
        }

    def prepare(self) -> None:
        """Once, after the weights are in."""
        if self.d2t is not None:
            self.draft_tokens_of_columns += self.d2t
        for linear in (self.fc, *([self.head] if self.head else [])):
            linear.pack()
        norms = [self.input_norm, self.hidden_norm, self.post_norm, self.norm, *self.fc_norms]
        for part in (self.attention, self.mlp, self.features_norm, *norms):
            if part is not None:
                part.prepare()

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [T, n * H_t] -> hidden states [T, H] for `forward`."""
        if self.features_norm is not None:
            features = self.features_norm(features)
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), 1)
            normed = [norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)]
            features = torch.cat(normed, 1)
        return self.fc(features)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, H]."""
        if self.embedding is None:
            return self._target_embed(ids)
        return F.embedding(ids, self.embedding)

    def forward(
        self, ids: Tensor, h: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer over any rows and writes their K/V, layer 0 of the draft's pool.

        Args:
            ids: [T] int64: of the row at position p, the token at p + 1.
            h: [T, H]: `fuse` of the target's features at p, or the second result at p - 1.
            positions: [T] int32 or int64, below the loader's `max_positions`.
            ctx: the draft's attention backend with its plan for these rows.

        Returns:
            [T, H] for `logits`, and [T, H] for the rows one position further.
        """
        rows = self.rope.rows(positions)
        normed = self.hidden_norm(h)
        residual = normed if self.config.norm_before_residual else h
        both = torch.cat((self.input_norm(self.embed(ids)), normed), 1)
        x = self.attention(both, rows, ctx)
        inner, residual = join(self.attention.o, self.post_norm, self.mlp.gate_up, x, residual)
        out, residual = join_whole(self.mlp.down, self.norm, self.mlp(inner), residual)
        return out, out if self.config.norm_output else residual

    def logits(self, normed: Tensor) -> Tensor:
        """[T, H], the first result of `forward` -> [T, V_d]."""
        return self._target_head(normed) if self.head is None else self.head(normed)


def load_eagle3(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    embed: Rows,
    lm_head: Rows,
    load_format: str = "auto",
) -> Eagle3Draft:
    """Builds and fills a draft.

    Args:
        max_positions: rows of the rotary tables.
        embed: the target's, ids [T] -> [T, H]; used where the checkpoint has no embedding.
        lm_head: the target's, [T, H] -> [T, V]; used where it has no head.
        load_format: "auto", or one of `DUMMY_FORMATS`: random weights, a config is enough.

    Raises:
        ConfigError: anything missing, broken or unsupported, in one line with the fix.
    """
    config = load_eagle3_config(folder)

    def build(own: frozenset[str]) -> Eagle3Draft:
        return Eagle3Draft(config, dtype, device, max_positions, embed, lm_head, own)

    if load_format in DUMMY_FORMATS:
        same = config.hidden_size == config.target_hidden_size
        draft = build(frozenset({OWN_HEAD} if same else {OWN_EMBEDDING, OWN_HEAD}))
        fill_dummy(draft.weights(), load_format)
        draft.prepare()
        return draft
    checkpoint = Checkpoint(folder)
    own = own_parts(checkpoint, config.draft_vocab_size, config.vocab_size)
    if config.hidden_size != config.target_hidden_size and not {OWN_EMBEDDING, OWN_HEAD} <= own:
        raise ConfigError(
            f"{folder}: the draft's hidden size {config.hidden_size} is not the target's"
            f" {config.target_hidden_size}, so it needs embed_tokens.weight and lm_head.weight of"
            " its own; the checkpoint is incomplete."
        )
    draft = build(own)
    checkpoint.read_into(
        draft.weights(), (*HARMLESS, *UNUSED), hint="Is config.json the one of these weights?"
    )
    check_offsets(folder, draft.d2t, config.vocab_size)
    draft.prepare()
    return draft
