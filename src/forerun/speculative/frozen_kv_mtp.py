"""FROZEN_KV_MTP: Gemma 4's assistant, a chain over the target's own K/V.

The draft has no K/V, so there is no draft extend: `observe` keeps the target's hidden state of the
last committed token, and `propose` goes on from there and from the token after it. All drafts of a
step attend to the same K/V, from the same position. `models/gemma4_assistant.py` has the layers.
(SGLang's name; transformers: `SinglePositionMultiTokenCandidateGenerator`.)
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.models.gemma4_assistant import (
    AssistantConfig,
    load_assistant,
    load_assistant_config,
)
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
from forerun.speculative.chain import NUM_STEPS, check_match, resolve_num_drafts, sample_chain
from forerun.speculative.sharding import of_rank

DEFAULT_STEPS = 3


class FrozenKVMTP(SpeculativeAlgorithm):
    options = (NUM_STEPS,)
    shards_draft = True
    quantizes_draft = True

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        folder, draft = _read(config)
        drafts = resolve_num_drafts(config, DEFAULT_STEPS)
        draft.sources(target, str(folder))
        check_match(folder, "target hidden size", draft.target_hidden_size, target.hidden_size)
        check_match(folder, "vocabulary", draft.model.vocab_size, target.vocab_size)
        heads = of_rank(config, folder, draft.heads_of)
        return SpecCaps(
            num_drafts=drafts,
            flexible=True,
            kv_reserve=drafts + 1,
            reads_target_kv=True,
            draft_heads=heads,
            draft_hidden_size=draft.model.hidden_size,
            draft_attention=draft.layer_masks,
            deferred_observe=True,
        )

    def load(self, ctx: DraftContext) -> None:
        folder, config = _read(ctx.config)
        self._target, self._dtype = ctx.target, ctx.dtype
        self._draft = load_assistant(
            folder,
            config,
            config.sources(ctx.target.config, str(folder)),
            ctx.placement,
            ctx.max_positions,
            ctx.config.load_format,
            ctx.quantization,
        )

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        """The target's hidden state of the last committed token."""
        shape = (ctx.slots, self._target.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=self._dtype, device=ctx.device)
        return SlotState({"hidden": self._hidden})

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def propose(self, step: ProposeInput) -> Draft:
        assert step.attention is not None
        context, hidden = step.attention(1, -1), self._hidden[step.slots]

        def next_logits(_: int, token: Tensor) -> Tensor:
            nonlocal hidden
            embeds = self._target.embed(token)
            out, hidden = self._draft.draft(embeds, hidden, step.start, context)
            return self._draft.compute_logits(out)

        return sample_chain(step, next_logits(0, step.last_token), next_logits)

    def observe(self, step: ObserveInput) -> None:
        self._hidden[step.slots] = step.hidden_states[step.last_index]


def _read(config: EngineConfig) -> tuple[Path, AssistantConfig]:
    folder = config.required_draft_path()
    return folder, load_assistant_config(folder)
