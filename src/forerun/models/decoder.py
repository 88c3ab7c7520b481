"""What decoder-only families share: an embedding, layers, a final norm and an LM head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.model_config import ModelConfig
from forerun.kernels.cpu.functions import tanh
from forerun.layers.communication import WeightPlacement
from forerun.layers.embedding import LMHead, VocabEmbedding
from forerun.layers.linear import Hidden
from forerun.layers.module import Module
from forerun.layers.residual import AuxHiddenStates, FinalRMSNorm
from forerun.layers.rope import LayerRopes
from forerun.models.base import CausalLM


@dataclass(frozen=True)
class Scales:
    """What a family does to the embedding and to the logits."""

    embedding: float = 1.0  # rounded to the weights' dtype
    logits: float = 1.0  # logits are divided by it
    logit_softcap: float | None = None  # c: logits become c · tanh(logit / c)

    @property
    def change_logits(self) -> bool:
        return self.logits != 1 or self.logit_softcap is not None

    def apply(self, logits: Tensor) -> Tensor:
        if self.logits != 1:
            logits = logits / self.logits
        if self.logit_softcap is not None:
            logits = tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits


class DecoderModel(Module):
    def __init__(
        self,
        config: ModelConfig,
        family: DecoderForCausalLM,
        place: WeightPlacement,
        max_positions: int,
    ) -> None:
        size, eps, norm = config.hidden_size, config.rms_norm_eps, family.rms_norm
        self.embed_tokens = VocabEmbedding(config.vocab_size, size, place, family.scales.embedding)
        masks = enumerate(family.layer_masks)
        self.layers = [family.decoder_layer(config, i, mask, place) for i, mask in masks]
        self.norm = FinalRMSNorm(size, eps, place, norm)
        kinds = list(zip(config.layer_ropes, config.layer_rotary_dims, strict=True))
        self.ropes = LayerRopes(kinds, max_positions, place.dtype, place.device)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, ctx: AttentionContext, aux: AuxHiddenStates
    ) -> Tensor:
        return self.run(self.embed_tokens(input_ids), positions, ctx, aux)

    def run(
        self, embeds: Tensor, positions: Tensor, ctx: AttentionContext, aux: AuxHiddenStates
    ) -> Tensor:
        """Runs the layers and the final norm over embeddings [T, H] -> [T, H]."""
        x: Hidden = embeds
        residual: Tensor | None = None
        for layer, rope in zip(self.layers, self.ropes.rows(positions), strict=True):
            x, residual = layer(x, residual, rope, ctx, aux)
        hidden_states, residual = self.norm(x, residual)
        aux.capture(len(self.layers), residual)
        return hidden_states


class DecoderForCausalLM(CausalLM):
    """A family of which only the layers are its own: `decoder_layer`."""

    decoder: ClassVar[type[DecoderModel]] = DecoderModel

    def __init__(self, config: ModelConfig, place: WeightPlacement, max_positions: int) -> None:
        self.config = config
        self.scales = self.scales_of(config)
        self.layer_masks = tuple(LayerMask(Mask.CAUSAL, window) for window in config.windows)
        self.model = self.decoder(config, self, place, max_positions)
        embed_tokens = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, place, embed_tokens)
        self.vocab_is_divided = place.comm.size > 1

    @classmethod
    def scales_of(cls, config: ModelConfig) -> Scales:
        """Returns scales, in families that have some."""
        return Scales()

    def embedding_rows(self) -> Tensor | None:
        return self.model.embed_tokens.rows

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.scales.apply(self.lm_head(hidden_states))

    def compute_own_logits(self, hidden_states: Tensor) -> Tensor:
        return self.scales.apply(self.lm_head.own_logits(hidden_states))

    def compute_argmax(self, hidden_states: Tensor) -> Tensor:
        # Logits that differ may be equal after rounding; then the lowest id is the largest.
        change = self.scales.apply if self.scales.change_logits else None
        return self.lm_head.argmax(hidden_states, change)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        capture_layers: tuple[int, ...] = (),
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        aux = AuxHiddenStates(capture_layers, rows, len(self.model.layers) - 1)
        hidden_states = self.model(input_ids, positions, ctx, aux)
        if rows is not None and len(hidden_states) != len(rows):
            # A family whose layers do not call `after_attention` computes all tokens.
            hidden_states = hidden_states.index_select(0, rows)
        return hidden_states, aux.concatenated()
