"""NGRAM: prompt lookup on the device, without a model.

The longest suffix of the text (up to `speculative_ngram_max_match` tokens) that occurred before is
looked up in the request's own tokens; what followed its latest occurrence is proposed. Where
nothing matches, the last token is repeated: shapes are fixed, and a wrong draft costs no more than
none. (Prompt lookup decoding, Saxena 2023.)
"""

from __future__ import annotations

import torch

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kernels.speculation.prompt_lookup import prompt_lookup
from forerun.speculative.base import (
    Draft,
    DraftContext,
    Option,
    ProposeInput,
    SpecCaps,
    SpeculativeAlgorithm,
)

DEFAULT_VERIFY_TOKENS = 8


class Ngram(SpeculativeAlgorithm):
    options = (
        Option("speculative_ngram_max_match", int, 4, "Longest suffix looked up, in tokens"),
        Option("speculative_ngram_min_match", int, 1, "Shortest suffix worth a draft"),
    )

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        width = config.speculative_num_draft_tokens or DEFAULT_VERIFY_TOKENS
        if width < 2:
            raise ConfigError(
                "speculative_num_draft_tokens must be >= 2 (a draft and the last token),"
                f" got {width}."
            )
        low, high = _matches(config)
        if not 1 <= low <= high:
            raise ConfigError(
                f"speculative_ngram_min_match ({low}) must be between 1 and"
                f" speculative_ngram_max_match ({high})."
            )
        if config.speculative_draft_model_path is not None:
            raise ConfigError(
                "This algorithm drafts from the text itself; drop speculative_draft_model_path."
            )
        return SpecCaps(num_drafts=width - 1, flexible=True, kv_reserve=width, observes_packed=True)

    def load(self, ctx: DraftContext) -> None:
        self._min, self._max = _matches(ctx.config)

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def propose(self, step: ProposeInput) -> Draft:
        num_drafts = step.num_verify_tokens - 1
        matches = self._min, self._max
        return Draft(prompt_lookup(step.history, step.slots, step.start, *matches, num_drafts))


def _matches(config: EngineConfig) -> tuple[int, int]:
    options = config.algorithm_options
    return int(options["speculative_ngram_min_match"]), int(options["speculative_ngram_max_match"])
