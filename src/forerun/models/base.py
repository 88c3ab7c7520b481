"""What the engine asks of a target model, and drafts of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, RopeInput
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.attention import KVLayer
from forerun.layers.communication import WeightPlacement
from forerun.layers.embedding import LMHead
from forerun.layers.linear import Hidden
from forerun.layers.module import Module
from forerun.layers.norm import RMSNorm
from forerun.layers.residual import AuxHiddenStates


class DecoderLayer(Module, ABC):
    """One layer of a family; drafts build theirs of the same class."""

    @abstractmethod
    def __init__(
        self, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> None:
        """`layer_id`: in the model, and of its K/V in the pools."""

    @abstractmethod
    def __call__(
        self,
        x: Hidden,
        residual: Tensor | None,
        rope: RopeInput,
        ctx: AttentionContext,
        aux: AuxHiddenStates,
    ) -> tuple[Hidden, Tensor | None]:
        """(x, residual) whose sum is the layer's output; residual None: x is all of it.

        Args:
            x: [T, H], what the layer before adds to the residual; the embedding for the first.
            residual: [T, H]; None: there is nothing but x.
            rope: positions and tables.
            ctx: attention over these tokens' K/V.
            aux: captures the layer's input.
        """


class CausalLM(Module, ABC):
    """A decoder over paged K/V. T tokens of any requests, in any mix; `ctx` knows whose."""

    decoder_layer: ClassVar[type[DecoderLayer]]
    config: ModelConfig
    layer_masks: tuple[LayerMask, ...]  # one per layer; not looked at for recurrent layers
    has_attention_sinks: bool = False
    has_logit_softcap: bool = False  # on attention scores
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")  # `hidden_act`s it computes
    partial_rotary: ClassVar[bool] = False  # whether part of a head may be rotated
    has_recurrent_layers: ClassVar[bool] = False
    rms_norm: ClassVar[type[RMSNorm]] = RMSNorm  # outside of layers
    lm_head: LMHead
    vocab_is_divided: bool = False  # every rank has the logits of some token ids
    has_lm_head: bool = True  # False: the checkpoint has none, and logits mean nothing

    @abstractmethod
    def __init__(self, config: ModelConfig, place: WeightPlacement, max_positions: int) -> None:
        """Weights are uninitialised until a loader fills `weights()`; then `prepare`.

        `max_positions`: length of the rotary tables.
        """

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] int -> [T, H]."""

    def embedding_rows(self) -> Tensor | None:
        """[V, H], what `embed` looks up; None: it does more."""
        return None

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        capture_layers: tuple[int, ...] = (),
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layers and writes their K/V.

        Args:
            input_ids: [T] int64.
            positions: [T] int32 or int64, absolute, below `max_positions`.
            ctx: the attention backend with its plan for these tokens.
            capture_layers: decoder layers whose outputs are captured.
            rows: [n] int64, the tokens whose final hidden states are needed; None: all. Not with
                the last layer among `capture_layers`.

        Returns:
            hidden_states [T, H] after the final norm, or [n, H] of `rows`; and aux_hidden_states
            [T, k · H], the outputs of the k captured layers (the residual stream, Hugging Face's
            `hidden_states[l + 1]`) concatenated in the order asked, or None for none. For the last
            layer this is the residual before the final norm, where Hugging Face has the normed one.
        """

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] after the final norm -> logits [T, V], in the model's dtype."""
        return self.lm_head(hidden_states)

    def head_logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [n, H] -> [n, V], before what a family does to logits.

        Raises:
            ConfigError: the model has an LM head of another kind.
        """
        if "lm_head" not in vars(self):
            raise ConfigError(
                "A draft with d2t and without lm_head.weight takes the rows of the target's LM"
                " head, and this target has none of ours; export the draft with its own."
            )
        return self.lm_head(hidden_states)

    def compute_own_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T, n], of this rank's token ids."""
        return self.lm_head.own_logits(hidden_states)

    def compute_argmax(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T] int64: the largest logit's id, the lowest of equals; keeps no logits."""
        return self.lm_head.argmax(hidden_states)

    def kv_layout(self, kv_dtype: torch.dtype) -> ModelLayout:
        """What the layers keep, in order; K/V is stored as `kv_dtype`."""
        return ModelLayout(tuple(layer.kv_layout(kv_dtype) for layer in self.modules(KVLayer)))
