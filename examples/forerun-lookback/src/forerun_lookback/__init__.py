"""LOOKBACK: proposes what followed the longest earlier occurrence of the text's last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
from forerun_lookback.automaton import SuffixAutomaton


class Lookback(SpeculativeAlgorithm):
    options = (
        Option("speculative_lookback_min_match", int, 1, "Shortest repetition that is continued"),
        Option("speculative_lookback_max_drafts", int, 8, "Drafts per step"),
    )

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        for option in cls.options:
            value = config.algorithm_options[option.name]
            if value < 1:
                raise ConfigError(f"{option.name} must be >= 1, got {value}.")
        if config.speculative_num_draft_tokens is not None:
            raise ConfigError(
                "Set speculative_lookback_max_drafts (drafts per step) instead of"
                " speculative_num_draft_tokens."
            )
        if config.speculative_draft_model_path is not None:
            raise ConfigError("This algorithm has no model; drop speculative_draft_model_path.")
        drafts = config.algorithm_options["speculative_lookback_max_drafts"]
        return SpecCaps(
            num_drafts=drafts,
            flexible=True,
            kv_reserve=drafts + 1,
            needs_host_tokens=True,
        )

    def load(self, ctx: DraftContext) -> None:
        self._device = ctx.device
        self._min_match = ctx.config.algorithm_options["speculative_lookback_min_match"]
        self._automata: dict[str, SuffixAutomaton] = {}

    def propose(self, step: ProposeInput) -> Draft:
        assert step.host is not None
        # Only the automata of this step's requests are kept; a missing one is built again.
        self._automata = {
            name: self._current(name, tokens)
            for name, tokens in zip(step.host.request_ids, step.host.tokens, strict=True)
        }
        count = step.num_verify_tokens - 1
        drafts = [self._draft(automaton, count) for automaton in self._automata.values()]
        return Draft(torch.tensor(drafts, device=self._device))

    def _current(self, name: str, tokens: Sequence[int]) -> SuffixAutomaton:
        """The request's automaton, extended by the tokens since its last step."""
        automaton = self._automata.get(name)
        known = len(automaton.tokens) if automaton else 0
        if automaton is None or automaton.tokens != list(tokens[:known]):  # ids may be used again
            automaton, known = SuffixAutomaton(), 0
        automaton.extend(tokens[known:])
        return automaton

    def _draft(self, automaton: SuffixAutomaton, count: int) -> list[int]:
        length, end = automaton.longest_repetition()
        if length < self._min_match:  # shapes are fixed, and a wrong draft costs no more than none
            return [automaton.tokens[-1]] * count
        return automaton.continuation(end, count)
