"""What decoder-only families share: an embedding, layers, a final norm and an LM head."""

from __future__ import annotations

from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.model_config import ModelConfig
from forerun.layers.communication import WeightPlacement
from forerun.layers.embedding import LMHead, VocabEmbedding
from forerun.layers.linear import Hidden
from forerun.layers.module import Module
from forerun.layers.residual import AuxHiddenStates, FinalRMSNorm
from forerun.layers.rope import Rope
from forerun.models.base import CausalLM, DecoderLayer


class DecoderModel(Module):
    def __init__(
        self,
        config: ModelConfig,
        decoder_layer: type[DecoderLayer],
        masks: tuple[LayerMask, ...],
        place: WeightPlacement,
        max_positions: int,
    ) -> None:
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, place)
        self.layers = [decoder_layer(config, i, mask, place) for i, mask in enumerate(masks)]
        self.norm = FinalRMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.rope = Rope(config.rope, config.rotary_dim, max_positions, place.dtype, place.device)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, ctx: AttentionContext, aux: AuxHiddenStates
    ) -> Tensor:
        x: Hidden = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        rope = self.rope.rows(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rope, ctx, aux)
        hidden_states, residual = self.norm(x, residual)
        aux.capture(len(self.layers), residual)
        return hidden_states


class DecoderForCausalLM(CausalLM):
    """A family of which only the layers are its own: `decoder_layer`."""

    def __init__(self, config: ModelConfig, place: WeightPlacement, max_positions: int) -> None:
        self.config = config
        self.layer_masks = tuple(LayerMask(Mask.CAUSAL, window) for window in config.windows)
        self.model = DecoderModel(
            config, self.decoder_layer, self.layer_masks, place, max_positions
        )
        embed_tokens = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, place, embed_tokens)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

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
