"""NONE: the algorithm that proposes nothing. Plain decoding is speculation at width 1."""

from __future__ import annotations

import torch

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.speculative.base import (
    Draft,
    DraftContext,
    ProposeInput,
    SpecCaps,
    SpeculativeAlgorithm,
)


class Plain(SpeculativeAlgorithm):
    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        return SpecCaps()

    def load(self, ctx: DraftContext) -> None:
        return None

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def propose(self, step: ProposeInput) -> Draft:
        raise AssertionError("a step of width 1 proposes nothing")
