"""What the engine asks of a target model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask
from forerun.config.model_config import ModelConfig
from forerun.kernels.sampling.argmax import argmax
from forerun.kvcache.layouts import ModelLayout


class CausalLM(ABC):
    """A decoder over paged K/V. T rows of any requests, in any mix; the context knows whose."""

    config: ModelConfig
    layer_masks: tuple[LayerMask, ...]  # one per layer; not looked at for recurrent layers
    has_attention_sinks: ClassVar[bool] = False
    has_logit_softcap: ClassVar[bool] = False  # on attention scores

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] int -> [T, H]."""

    @abstractmethod
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        capture: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layers and writes their K/V.

        Args:
            ids: [T] int64.
            positions: [T] int32 or int64, absolute, below the loader's `max_positions`.
            ctx: the attention backend with its plan for these rows.
            capture: decoder layers whose output is wanted.

        Returns:
            Hidden [T, H] after the final norm; and for n captured layers their outputs (the
            residual stream, Hugging Face's `hidden_states[l + 1]`) concatenated in the order
            asked, [T, n * H], or None for none. For the last layer this is the raw residual,
            where Hugging Face has the normed one.
        """

    @abstractmethod
    def lm_head(self, hidden: Tensor) -> Tensor:
        """[T, H] after the final norm -> logits [T, V], in the model's dtype."""

    def lm_head_argmax(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T] int64: the largest logit's id, the lowest of equals; logits not kept."""
        return argmax(self.lm_head(hidden))

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view it is copied into; fused matrices have one view a part."""

    @abstractmethod
    def prepare(self) -> None:
        """Once, after the weights are in: packs them and derives what the layers need."""

    def kv_layout(self, dtype: torch.dtype) -> ModelLayout:
        """What the layers keep; K/V is stored as `dtype`."""
        config = self.config
        return ModelLayout.dense(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
