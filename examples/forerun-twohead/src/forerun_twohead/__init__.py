"""TWOHEAD: predicts the tokens after the next one from the target's last hidden state.

propose: the hidden state that gave `last_token`, through the heads and the target's lm_head.
observe: the hidden state of the last committed token is kept for the next step.

Nothing is read on the host and all shapes follow from (B, W), so on a GPU both are captured with
the step. (Medusa, arXiv 2401.10774, section 2.1.)
"""

from __future__ import annotations

from pathlib import Path

import torch

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.speculative.base import (
    Draft,
    DraftContext,
    ObserveInput,
    ProposeInput,
    SlotContext,
    SlotState,
    SpecCaps,
    SpeculativeAlgorithm,
)
from forerun_twohead.heads import SHIPPED, Heads, Shape, read_shape


class TwoHead(SpeculativeAlgorithm):
    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        path, shape = _weights(config)
        if shape.hidden_size != target.hidden_size:
            raise ConfigError(
                f"The heads of {path} read hidden states of {shape.hidden_size}, the target's have"
                f" {target.hidden_size}. Train heads for this target."
            )
        tokens = config.speculative_num_draft_tokens or shape.heads + 1
        if not 2 <= tokens <= shape.heads + 1:
            raise ConfigError(
                f"speculative_num_draft_tokens must be 2 to {shape.heads + 1} (a draft per head,"
                f" and the last token), got {tokens}."
            )
        return SpecCaps(num_drafts=tokens - 1, flexible=True, kv_reserve=tokens)

    def load(self, ctx: DraftContext) -> None:
        path, self._shape = _weights(ctx.config)
        self._heads = Heads.load(path, ctx.device, ctx.dtype)
        self._target, self._dtype = ctx.target, ctx.dtype
        self._ahead = 1 + torch.arange(ctx.caps.num_drafts, device=ctx.device)

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        size = self._shape.hidden_size
        self._hidden = torch.zeros(ctx.slots, size, dtype=self._dtype, device=ctx.device)
        return SlotState({"hidden": self._hidden})

    def propose(self, step: ProposeInput) -> Draft:
        drafts = step.num_verify_tokens - 1
        hidden = self._heads(self._hidden[step.slots], drafts)  # [B, n, H]
        logits = self._target.compute_logits(hidden.flatten(0, 1)).unflatten(0, (-1, drafts))
        # `last_token` is at `start`, the drafts follow.
        return Draft(step.sample(logits, step.start.unsqueeze(1) + self._ahead[:drafts]))

    def observe(self, step: ObserveInput) -> None:
        self._hidden[step.slots] = step.hidden_states[step.last_index]


def _weights(config: EngineConfig) -> tuple[Path, Shape]:
    """The file that was named, or the one of the package, which fits the bundled target."""
    named = config.speculative_draft_model_path
    if named is None and config.model_path is not None:
        raise ConfigError(
            "The package's heads belong to the bundled target. Train heads for this one (train.py)"
            " and name the file with speculative_draft_model_path."
        )
    path = SHIPPED if named is None else Path(named).expanduser()
    try:
        return path, read_shape(path)
    except ValueError as error:
        raise ConfigError(f"{error}. Name a file that train.py wrote.") from error
