"""EAGLE: SGLang's name for drafting with a checkpoint's own multi-token prediction layer.

There `--speculative-algorithm EAGLE` also serves EAGLE-1 and EAGLE-2 heads; Forerun has none of
these, and refuses them with what to use instead.
"""

from __future__ import annotations

import torch

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.models.further_layers import count_layers
from forerun.models.speculators import refuse_speculators
from forerun.speculative.base import SpecCaps
from forerun.speculative.nextn import NextN, draft_folder


class Eagle(NextN):
    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        folder = draft_folder(config)
        refuse_speculators(folder)
        if count_layers(load_model_config(folder)) == 0:
            raise ConfigError(
                f"EAGLE drafts with a multi-token prediction layer, as NEXTN does, and {folder}"
                " has none. For an EAGLE-3 head set speculative_algorithm EAGLE3; EAGLE-1 and"
                " EAGLE-2 heads are not supported."
            )
        return super().resolve(config, target, dtype)
