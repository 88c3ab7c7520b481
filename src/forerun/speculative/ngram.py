"""NGRAM: prompt lookup on the device, without a model.

The longest suffix of the text (up to `speculative_ngram_max_match` tokens) that occurred before is
looked up in the request's own tokens; what followed its latest occurrence is proposed. Where
nothing matches, the last token is repeated: shapes are fixed, and a wrong draft costs no more than
none. (Prompt lookup decoding, Saxena 2023.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
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
        return SpecCaps(num_drafts=width - 1, flexible=True, kv_reserve=width)

    def load(self, ctx: DraftContext) -> None:
        self._min, self._max = _matches(ctx.config)
        self._positions = torch.arange(ctx.max_positions, device=ctx.device, dtype=torch.int32)

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def propose(self, step: ProposeInput) -> Draft:
        history = step.history.index_select(0, step.slots)  # [B, C] int32, known up to `start`
        last = step.start.unsqueeze(1)  # [B, 1]: position of the last token
        positions = self._positions[: history.shape[1]].unsqueeze(0)  # [1, C]
        length = self._match_lengths(history, last, positions)
        # Longest match first, then the latest position.
        score = torch.where(length >= self._min, length * history.shape[1] + positions, -1)
        best, position = score.max(dim=1, keepdim=True)  # [B, 1]
        drafts = torch.arange(step.num_verify_tokens - 1, device=position.device)
        ahead = position + 1 + drafts  # [B, K]
        # Past the last token the match continues into the draft itself: wrap by its period.
        period = (last - position).clamp_min(1)
        ahead = torch.where(ahead > last, position + 1 + (ahead - position - 1) % period, ahead)
        tokens = history.gather(1, ahead.clamp_max(history.shape[1] - 1))
        last_token = history.gather(1, last.long())
        return Draft(torch.where(best >= 0, tokens, last_token).long())

    def _match_lengths(self, history: Tensor, last: Tensor, positions: Tensor) -> Tensor:
        """[B, C] int32: how many tokens up to each position equal the last ones."""
        length = torch.zeros_like(history)
        running = positions < last  # only earlier positions
        for back in range(self._max):
            token = history.gather(1, (last - back).clamp_min(0).long())  # [B, 1]
            shifted = torch.roll(history, back, dims=1)  # value at position - back
            running = running & (shifted == token) & (positions >= back) & (last >= back)
            length += running
        return length


def _matches(config: EngineConfig) -> tuple[int, int]:
    options = config.algorithm_options
    return int(options["speculative_ngram_min_match"]), int(options["speculative_ngram_max_match"])
