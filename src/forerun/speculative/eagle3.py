"""EAGLE3: a small draft over hidden states of three target layers, as a chain, a tree or at once.

Where the target has run, the draft reads fc(auxiliary hidden states); further ahead, the hidden
state that it gave itself, or a mask (P-EAGLE). `chain.py` has the phases, `models/eagle3.py` the
layers. (arXiv 2503.01840, section 3.1.)
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from forerun.config.engine_config import EngineConfig
from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig
from forerun.config.schema import checked
from forerun.models.eagle3 import load_eagle3
from forerun.models.eagle3_config import Eagle3Config, load_eagle3_config
from forerun.speculative.base import DraftContext, ObserveInput, SpecCaps
from forerun.speculative.beam_tree import AT_ONCE, TOPK, BeamTree, resolve_tree
from forerun.speculative.chain import (
    NUM_STEPS,
    PARALLEL_STEPS,
    HiddenStateChain,
    MaskInput,
    check_match,
    resolve_num_drafts,
)
from forerun.speculative.same_tokens import check_same_tokens
from forerun.speculative.sharding import of_rank

log = logging.getLogger("forerun")
DEFAULT_STEPS = 5


class Eagle3(HiddenStateChain):
    options = (NUM_STEPS, TOPK)
    bundled_draft = "eagle3"
    quantizes_draft = True
    shards_draft = True

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        folder, draft = _read(config)
        drafts = resolve_num_drafts(config, default_steps(folder, draft), trees=True)
        check_match(folder, "target hidden size", draft.target_hidden_size, target.hidden_size)
        check_match(folder, "vocabulary", draft.vocab_size, target.vocab_size)
        check_same_tokens(config, folder)
        caps = SpecCaps(
            num_drafts=drafts,
            flexible=True,
            kv_reserve=drafts + 1,
            target_layers=draft.target_layers(target.num_layers),
            draft_kv=of_rank(config, folder, lambda comm: draft.kv_layout(dtype, comm)),
            draft_heads=draft.num_heads // config.draft_ranks,
            draft_hidden_size=draft.hidden_size,
            draft_attention=draft.layer_masks,
            prefix_lookahead=1,
            deferred_observe=True,
            reads_hidden_states=False,
        )
        return resolve_tree(config, caps, None if draft.mask_token_id is None else AT_ONCE)

    def load(self, ctx: DraftContext) -> None:
        folder, config = _read(ctx.config)
        layers = config.target_layers(ctx.target.config.num_layers)
        if config.aux_layer_ids is None and ctx.comm.rank == 0:
            log.info("The draft %s names no target layers; EAGLE-3's are %s.", folder, layers)
        self._draft = load_eagle3(
            folder,
            ctx.placement,
            ctx.max_positions,
            ctx.target,
            ctx.config.load_format,
            ctx.quantization,
        )
        offsets = self._draft.d2t
        pruned = offsets is not None and bool(offsets.any())
        token_ids = self._draft.target_token_ids if pruned else None
        mask = None
        if config.mask_token_id is not None and self._draft.mask_hidden is not None:
            features = self._draft.mask_hidden.flatten(0, 1)
            hidden = self._draft.combine_hidden_states(features)
            mask = MaskInput(config.mask_token_id, hidden)
        tree = BeamTree.of(ctx.config, ctx.caps)
        self.set_draft([self._draft], config.hidden_size, ctx.dtype, token_ids, mask, tree)

    def target_hidden_states(self, step: ObserveInput) -> Tensor:
        assert step.aux_hidden_states is not None
        return self._draft.combine_hidden_states(step.aux_hidden_states)


def _read(config: EngineConfig) -> tuple[Path, Eagle3Config]:
    folder = config.required_draft_path()
    return folder, load_eagle3_config(folder)


def default_steps(folder: Path, draft: Eagle3Config) -> int:
    """Drafts per step where no setting says another number."""
    parallel = draft.mask_token_id is not None
    return _trained_steps(folder) or (PARALLEL_STEPS if parallel else DEFAULT_STEPS)


class _Method(msgspec.Struct):
    speculative_tokens: Annotated[int, Meta(ge=0, le=1 << 10)] | None = None


class _Methods(msgspec.Struct):
    proposal_methods: list[_Method] | None = None


class _Suggested(msgspec.Struct):
    speculators_config: _Methods | None = None


def _trained_steps(folder: Path) -> int | None:
    """Drafts per step that the checkpoint suggests (speculators)."""
    path = folder / "config.json"
    inner = checked(_Suggested, read_json(path), str(path)).speculators_config or _Methods()
    steps = [method.speculative_tokens for method in inner.proposal_methods or ()]
    return next((count for count in steps if count), None)
