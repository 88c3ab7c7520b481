"""NEXTN: the layer for multi-token prediction that a checkpoint brings for itself, as a chain.

Its rows read the target's last hidden state where the target has run, and further ahead their own;
see `chain.py` for the phases and `models/nextn.py` for the layer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.communication import WeightPlacement
from forerun.models.nextn import NextNConfig, NextNDraft, load_nextn, load_nextn_config
from forerun.speculative.base import DraftContext, ObserveInput, SpecCaps, TargetHandle
from forerun.speculative.chain import NUM_STEPS, HiddenChain, chain_length, refuse_misfit

DEFAULT_STEPS = 3  # the layer was trained for one, and is run again over its own output


class NextN(HiddenChain):
    options = (NUM_STEPS,)

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        folder, draft = _read(config)
        model, drafts = draft.model, chain_length(config, DEFAULT_STEPS)
        refuse_misfit(folder, "hidden size", model.hidden_size, target.hidden_size)
        refuse_misfit(folder, "vocabulary", model.vocab_size, target.vocab_size)
        return SpecCaps(
            num_drafts=drafts,
            flexible=True,
            kv_reserve=drafts + 1,
            draft_kv=ModelLayout.dense(1, model.num_kv_heads, model.head_dim, dtype),
            draft_heads=model.num_heads,
            draft_attention=(draft.mask,),
            prefix_lookahead=1,
            deferred_observe=True,
        )

    def load(self, ctx: DraftContext) -> None:
        folder, config = _read(ctx.config)
        self._layer = load_nextn(
            folder,
            config,
            WeightPlacement(ctx.dtype, ctx.device),
            ctx.max_positions,
            ctx.config.load_format,
        )
        self.use(_Shared(self._layer, ctx.target), config.model.hidden_size, ctx.dtype, None)

    def hidden(self, step: ObserveInput) -> Tensor:
        return step.hidden_states


class _Shared:
    """The layer between the target's embedding and the target's head."""

    def __init__(self, layer: NextNDraft, target: TargetHandle) -> None:
        self._layer, self._embed = layer, target.embed
        self.compute_logits = target.compute_logits

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        out = self._layer.forward(self._embed(input_ids), hidden_states, positions, ctx)
        return out, out


def _read(config: EngineConfig) -> tuple[Path, NextNConfig]:
    """The target's own folder, if no other is named."""
    path = config.speculative_draft_model_path or config.model_path
    if path is None:
        raise ConfigError(
            "The bundled model has no layer that predicts further ahead; set model_path to one that"
            " has, or use another speculative_algorithm."
        )
    folder = Path(path).expanduser()
    return folder, load_nextn_config(folder)
