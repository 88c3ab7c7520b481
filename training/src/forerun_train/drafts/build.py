"""Builds the draft that the options describe, with its first weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun_train.drafts.body import DFlashBody
from forerun_train.drafts.config import draft_config, initial_config, parse
from forerun_train.drafts.draft import BlockDraft, DraftVocabulary, Objective
from forerun_train.drafts.heads import HeadSizes, TrainingHead, build_head
from forerun_train.hidden_states import FrozenTarget
from forerun_train.objectives import Mix, PositionWeights
from forerun_train.trainer.options import TrainOptions

OFFSETS = "d2t"


@dataclass(frozen=True)
class BuiltDraft:
    """A draft, and what its checkpoint says of it."""

    model: BlockDraft
    raw: dict[str, Any]  # config.json
    ids: Tensor | None  # of a pruned vocabulary


def build_draft(
    options: TrainOptions, target: FrozenTarget, mask_token: int, ids: Tensor | None = None
) -> BuiltDraft:
    """The draft with weights of the seed, or of `initial_draft`; on the target's device.

    Args:
        ids: [V_d] int64, tokens of a pruned vocabulary; None: all.

    Raises:
        ConfigError: the options do not fit the target.
    """
    torch.manual_seed(options.seed)
    pruned = None if ids is None else len(ids)
    if options.initial_draft is not None:
        raw = initial_config(Path(options.initial_draft))
    else:
        raw = draft_config(options, target.config, mask_token, pruned)
    config = parse(raw)
    body = DFlashBody(config, options.seq_len + config.block_size, options.activation_checkpointing)
    sizes = HeadSizes(config.hidden_size, config.vocab_size, config.draft_vocab_size)
    head = build_head(config.head, sizes)
    objective = Objective(_mix(options, head), PositionWeights(options.decay, options.dpace))
    model = BlockDraft(config, body, head, DraftVocabulary(target, ids), objective)
    if options.initial_draft is not None:
        load_weights(model, Path(options.initial_draft))
    model.to(target.device)
    return BuiltDraft(model, raw, ids)


def _mix(options: TrainOptions, head: TrainingHead) -> Mix:
    given = options.ce_weight, options.kl_weight, options.l1_weight
    if given == (None, None, None):
        return head.default_mix
    return Mix(*(weight or 0.0 for weight in given))


def tensors_of(model: BlockDraft, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of parameters -> names of z-lab's checkpoints: body and head have no prefix there."""
    return {name.partition(".")[2]: value for name, value in states.items()}


def load_weights(model: BlockDraft, folder: Path) -> None:
    """Reads the weights of an exported draft.

    Raises:
        ConfigError: tensors are missing or others are there.
    """
    found = {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}
    own = {name.partition(".")[2]: p for name, p in model.named_parameters()}
    differing = sorted(own.keys() ^ (found.keys() - {OFFSETS, "lm_head.weight"}))
    if differing:
        raise ConfigError(f"initial_draft {folder}: {differing[0]} is missing or not expected.")
    for name, parameter in own.items():
        if parameter.shape != found[name].shape:
            raise ConfigError(
                f"initial_draft {folder}: {name} is {list(found[name].shape)}, expected"
                f" {list(parameter.shape)}."
            )
        parameter.data.copy_(found[name].float())
