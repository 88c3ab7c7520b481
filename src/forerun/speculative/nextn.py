"""NEXTN: the multi-token prediction (MTP) layers of the target's own checkpoint.

Where the target has run, the first layer reads the target's last hidden state, and each further one
what the layer before it gave. `chain.py` has the phases, `models/nextn.py` the layers. Most
checkpoints have one, trained for one token ahead: drafts past the last layer run it again over its
own output. (DeepSeek-V3, arXiv 2412.19437, section 2.2.)

A layer is a decoder layer of the target's family with tensors model.layers.<N>.*, as in
DeepSeek-V3's checkpoint; its cache is of the same kind as the target's (latent rows for MLA), in a
pool of the draft's own.
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
from forerun.layers.communication import Communicator
from forerun.models.nextn import NextNConfig, NextNDraft, load_nextn, load_nextn_config
from forerun.speculative.base import DraftContext, ObserveInput, SpecCaps, TargetHandle
from forerun.speculative.beam_tree import TOPK, BeamTree, resolve_tree
from forerun.speculative.chain import NUM_STEPS, HiddenStateChain, check_match, resolve_num_drafts
from forerun.speculative.sharding import of_rank

DEFAULT_STEPS = 3


class NextN(HiddenStateChain):
    options = (NUM_STEPS, TOPK)
    shards_draft = True
    quantizes_draft = True

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        folder, draft = _read(config)
        model = draft.model
        drafts = resolve_num_drafts(config, default_steps(draft), trees=True)
        check_match(folder, "hidden size", model.hidden_size, target.hidden_size)
        check_match(folder, "vocabulary", model.vocab_size, target.vocab_size)

        def layout(comm: Communicator) -> ModelLayout:
            return NextNDraft.kv_layout(draft, dtype, comm)

        caps = SpecCaps(
            num_drafts=drafts,
            flexible=True,
            kv_reserve=drafts + 1,
            draft_kv=of_rank(config, folder, layout),
            draft_heads=model.num_heads // config.draft_ranks,
            draft_hidden_size=model.hidden_size,
            draft_attention=(draft.mask,) * draft.count,
            prefix_lookahead=draft.count,
            deferred_observe=True,
        )
        return resolve_tree(config, caps)

    def load(self, ctx: DraftContext) -> None:
        folder, config = _read(ctx.config)
        draft = load_nextn(
            folder,
            config,
            ctx.placement,
            ctx.max_positions,
            ctx.config.load_format,
            ctx.quantization,
        )
        modules = [_SharedEnds(draft, i, ctx.target) for i in range(config.count)]
        tree = BeamTree.of(ctx.config, ctx.caps)
        self.set_draft(modules, config.model.hidden_size, ctx.dtype, tree=tree)

    def target_hidden_states(self, step: ObserveInput) -> Tensor:
        return step.hidden_states


def default_steps(draft: NextNConfig) -> int:
    """Drafts per step where no setting says another number."""
    return max(DEFAULT_STEPS, draft.count)


class _SharedEnds:
    """Layer `index` between the target's embedding and the target's lm_head."""

    def __init__(self, draft: NextNDraft, index: int, target: TargetHandle) -> None:
        self._draft, self._index, self._embed = draft, index, target.embed
        self.compute_logits = target.compute_logits

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        embeds = self._embed(input_ids)
        out = self._draft.forward(embeds, hidden_states, positions, ctx, self._index)
        return out, out


def _read(config: EngineConfig) -> tuple[Path, NextNConfig]:
    folder = draft_folder(config)
    return folder, load_nextn_config(folder)


def draft_folder(config: EngineConfig) -> Path:
    """The target's own folder, if no other is named.

    Raises:
        ConfigError: neither is set, and the bundled model has no such layer.
    """
    path = config.speculative_draft_model_path or config.model_path
    if path is None:
        raise ConfigError(
            "The bundled model has no multi-token prediction layer; set model_path to one that has,"
            " or use another speculative_algorithm."
        )
    return Path(path).expanduser()
