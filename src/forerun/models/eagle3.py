"""The EAGLE-3 draft: a decoder layer that reads a token and a hidden state (arXiv 2503.01840).

Its input at position p is a hidden state of p and the token at p + 1; it predicts the token at
p + 2. Where the target has run, the hidden state is fc(the target's aux_hidden_states at p);
further ahead it is what the draft's own layer gave at p - 1. The attention reads
[norm(embedding) | norm(hidden state)], of width 2H; the residual is the hidden state. Layers after
it, if there are some, are ordinary ones. Reads checkpoints of SpecForge and of speculators, and
P-EAGLE's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Hidden, Linear
from forerun.layers.mlp import GatedMLP
from forerun.layers.norm import RMSNorm
from forerun.layers.residual import NO_CAPTURE, AddRMSNorm, FinalRMSNorm, kept
from forerun.layers.rope import LayerRopes
from forerun.layers.sharding import Shard
from forerun.models.checkpoint import Checkpoint
from forerun.models.decoder_layer import SelfAttention
from forerun.models.draft_base import (
    OFFSETS,
    OWN_EMBEDDING,
    OWN_HEAD,
    DraftModel,
    DraftVocab,
    TargetVocab,
    check_draft,
    dummy_draft,
    own_parts,
    read_draft,
)
from forerun.models.dummy_weights import DUMMY_FORMATS
from forerun.models.eagle3_config import (
    MASK_HIDDEN,
    Eagle3Config,
    draft_tensors,
    load_eagle3_config,
)
from forerun.models.llama import LlamaDecoderLayer
from forerun.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer


class Eagle3Attention(SelfAttention):
    """Llama's attention, over twice the hidden size."""

    @classmethod
    def input_size(cls, config: ModelConfig) -> int:
        return 2 * config.hidden_size


class Eagle3QKNormAttention(Eagle3Attention, Qwen3Attention):
    """Qwen3's, over twice the hidden size."""


class Eagle3Draft(DraftModel):
    """`target_token_ids` [V_d] int64: the target's id of every column of the logits."""

    # In checkpoints these names follow `config.layer_prefix`.
    LAYER = ("input_layernorm", "hidden_norm", "self_attn", "post_attention_layernorm", "mlp")

    def __init__(
        self,
        config: Eagle3Config,
        place: WeightPlacement,
        max_positions: int,
        target: TargetVocab,
        own: frozenset[str] = frozenset(),
    ) -> None:
        """Weights are uninitialised until a loader fills them; then `prepare`.

        Args:
            max_positions: length of the rotary tables.
            own: the checkpoint's vocabulary parts (`own_parts`).
        """
        model, size, eps = config.model, config.hidden_size, config.model.rms_norm_eps
        sizes = config.vocab_size, config.draft_vocab_size, size
        super().__init__(DraftVocab(*sizes, own), target, place)
        self.config, self.layer_masks = config, config.layer_masks
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.aux_hidden_size, eps, place)
        if config.fc_norm:
            norms = range(config.num_aux_layers)
            self.fc_norm = [RMSNorm(config.target_hidden_size, eps, place) for _ in norms]
        self.fc = Linear(config.aux_hidden_size, size, bias=False, place=place)
        self.input_layernorm = RMSNorm(size, eps, place)
        self.hidden_norm = RMSNorm(size, eps, place)
        attention = Eagle3QKNormAttention if config.qk_norm else Eagle3Attention
        self.self_attn = attention(model, 0, self.layer_masks[0], place)
        self.post_attention_layernorm = AddRMSNorm(size, eps, place)
        self.mlp = GatedMLP(size, model.intermediate_size, model.mlp_bias, place)
        layer = Qwen3DecoderLayer if config.qk_norm else LlamaDecoderLayer
        masks = list(enumerate(self.layer_masks))[1:]
        self.further = [layer(model, i, mask, place) for i, mask in masks]
        self.norm = FinalRMSNorm(size, eps, place)
        self.mask_hidden: Tensor | None = None
        if config.mask_token_id is not None:
            self.mask_hidden = place.empty(1, 1, config.aux_hidden_size)
        ropes = [(rope, model.head_dim) for rope in model.layer_ropes]
        self.ropes = LayerRopes(ropes, max_positions, place.dtype, place.device)
        self.target_token_ids = torch.arange(config.draft_vocab_size, device=place.device)

    def combine_hidden_states(self, aux_hidden_states: Tensor) -> Tensor:
        """The target's hidden states [T, n · H_t] -> [T, H] for `forward`."""
        x = aux_hidden_states
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            parts = zip(self.fc_norm, x.chunk(len(self.fc_norm), 1), strict=True)
            x = torch.cat([norm(part) for norm, part in parts], 1)
        return self.fc(x)

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Runs the layers over any tokens and writes their K/V to the draft's pools.

        Args:
            input_ids: [T] int64: for position p, the token at p + 1.
            hidden_states: [T, H]: `combine_hidden_states` of the target at p, or the second result
                at p - 1.
            positions: [T] int32 or int64, below `max_positions`.
            ctx: the draft's attention backend with its plan for these tokens.

        Returns:
            [T, H] for `compute_logits`, and [T, H], the hidden states for one position further.
        """
        first, *further = self.ropes.rows(positions)
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.config.norm_before_residual else kept(hidden_states)
        embeds = self.input_layernorm(self.embed(input_ids))
        x: Hidden = self.self_attn(torch.cat((embeds, normed), 1), first, ctx)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        for layer, rope in zip(self.further, further, strict=True):
            x, residual = layer(x, residual, rope, ctx, NO_CAPTURE)
        out, residual = self.norm(x, residual)
        return out, out if self.config.norm_output else residual

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        views = super().weights()
        if self.mask_hidden is not None:
            views[MASK_HIDDEN] = self.mask_hidden
        return {f"{prefix}{self._stored_as(name)}": view for name, view in views.items()}

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        shards = super().shards().items()
        return {f"{prefix}{self._stored_as(name)}": shard for name, shard in shards}

    def _stored_as(self, name: str) -> str:
        if name.startswith(self.LAYER):
            return f"{self.config.layer_prefix}{name}"
        part, _, rest = name.partition(".")
        if part != "further":
            return name
        number, _, rest = rest.partition(".")
        return f"layers.{int(number) + 1}.{rest}"

    def prepare(self) -> None:
        super().prepare()
        self.post_attention_layernorm.link(self.mlp.gate_up_proj)
        if self.d2t is not None:
            self.target_token_ids += self.d2t


def load_eagle3(
    folder: Path,
    place: WeightPlacement,
    max_positions: int,
    target: TargetVocab,
    load_format: str = "auto",
    quantization: str | None = None,
) -> Eagle3Draft:
    """Builds and fills a draft.

    Args:
        max_positions: length of the rotary tables.
        load_format: "auto", or one of `DUMMY_FORMATS`: random weights, a config is enough.
        quantization: of its linears (`quantize_draft`).

    Raises:
        ConfigError: anything missing, broken or unsupported, in one line with the fix.
    """
    config = load_eagle3_config(folder)
    if load_format in DUMMY_FORMATS:
        same = config.hidden_size == config.target_hidden_size
        own = frozenset({OWN_HEAD} if same else {OWN_EMBEDDING, OWN_HEAD})
        draft = Eagle3Draft(config, place, max_positions, target, own)
        return dummy_draft(draft, load_format, place.comm, quantization)
    stored = _stored(folder, config, target)
    return read_draft(*stored, place, max_positions, quantization)


def check_eagle3_files(folder: Path) -> None:
    """Compares a draft's weights with its config, and loads nothing.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape.
    """
    no_target = cast(TargetVocab, None)  # nothing is computed
    stored = _stored(folder, load_eagle3_config(folder), no_target)
    check_draft(*stored, WeightPlacement(torch.bfloat16, torch.device("meta")))


def _stored(
    folder: Path, config: Eagle3Config, target: TargetVocab
) -> tuple[Callable[[WeightPlacement, int], Eagle3Draft], Checkpoint]:
    """What builds the draft (as `read_draft` calls it), and its tensors."""
    checkpoint = draft_tensors(folder)
    sizes = config.draft_vocab_size, config.vocab_size
    own = own_parts(checkpoint, *sizes, (OWN_HEAD, OFFSETS))
    if config.hidden_size != config.target_hidden_size and not {OWN_EMBEDDING, OWN_HEAD} <= own:
        raise ConfigError(
            f"{folder}: the draft's hidden size {config.hidden_size} is not the target's"
            f" {config.target_hidden_size}, so it needs embed_tokens.weight and lm_head.weight of"
            " its own; the checkpoint is incomplete."
        )

    def build(place: WeightPlacement, positions: int) -> Eagle3Draft:
        return Eagle3Draft(config, place, positions, target, own)

    return build, checkpoint
