"""SUFFIX: suffix decoding on the device, without a model.

The end of the text, `speculative_suffix_max_tree_depth` tokens at most, is looked up in the
request's own text and in a corpus of outputs of earlier and running requests; what followed it most
often is proposed, with the share as its confidence. The corpus has a fixed size on the device:
what a step commits is added to it within the step, and the oldest texts make room.

It lets one request's text decide how fast another's is generated, never which text that is.
(Suffix decoding, arXiv 2411.04975; the options are vLLM's.)
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kernels.speculation.suffix import (
    ONE,
    TEXT_TOKENS,
    Corpus,
    Rule,
    Writing,
    append,
    suffix_drafts,
)
from forerun.speculative.base import (
    Draft,
    DraftContext,
    ObserveInput,
    Option,
    Phase,
    ProposeInput,
    SlotContext,
    SlotState,
    SpecCaps,
    SpeculativeAlgorithm,
)

DEFAULT_VERIFY_TOKENS = 16
MAX_DEPTH = TEXT_TOKENS // 4
MAX_TEXTS = 1 << 20  # of the corpus: 1 GiB
DEPTH = Option(
    "speculative_suffix_max_tree_depth", int, 24, "Longest end of the text looked up, in tokens"
)
TEXTS = Option(
    "speculative_suffix_max_cached_requests",
    int,
    4096,
    f"Texts of {TEXT_TOKENS} tokens kept of all requests' outputs; a longer output takes several;"
    " 0: only the request's own text",
)
FACTOR = Option(
    "speculative_suffix_max_spec_factor",
    float,
    1.0,
    "Drafts that a match answers for, per matching token",
)
MIN_PROB = Option(
    "speculative_suffix_min_token_prob",
    float,
    0.1,
    "Least estimated probability of a draft that a match answers for",
)

PER_KEY = Option(
    "speculative_suffix_per_key",
    bool,
    False,
    "Keep the outputs of each API key apart: requests see those of their own key only",
)


class Suffix(SpeculativeAlgorithm):
    options: ClassVar[tuple[Option, ...]] = (DEPTH, TEXTS, FACTOR, MIN_PROB, PER_KEY)

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        width = config.speculative_num_draft_tokens or DEFAULT_VERIFY_TOKENS
        for name, value, low, high in (
            ("speculative_num_draft_tokens", width, 2, TEXT_TOKENS // 2),
            (DEPTH.name, config.algorithm_options[DEPTH.name], 1, MAX_DEPTH),
            (TEXTS.name, config.algorithm_options[TEXTS.name], 0, MAX_TEXTS),
            (FACTOR.name, config.algorithm_options[FACTOR.name], 0, TEXT_TOKENS),
            (MIN_PROB.name, config.algorithm_options[MIN_PROB.name], 0, 1),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} must be between {low} and {high}, got {value}.")
        if config.speculative_draft_model_path is not None:
            raise ConfigError(
                "This algorithm drafts from texts alone; drop speculative_draft_model_path."
            )
        return SpecCaps(
            num_drafts=width - 1,
            flexible=True,
            kv_reserve=width,
            reads_hidden_states=False,
            deferred_observe=True,
            observes_packed=True,
        )

    def load(self, ctx: DraftContext) -> None:
        options = ctx.config.algorithm_options
        depth, texts = options[DEPTH.name], options[TEXTS.name]
        limits = [int(options[FACTOR.name] * matching) for matching in range(depth + 1)]
        self._rule = Rule(
            depth,
            torch.tensor(limits, dtype=torch.int32, device=ctx.device),
            round(options[MIN_PROB.name] * ONE),
        )
        self._adds, self._per_key = texts > 0, options[PER_KEY.name]
        # Each request that runs has a text of its own.
        self._corpus = Corpus.new(max(texts, ctx.max_running_requests) if texts else 1, ctx.device)

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        """The text that each slot writes to."""
        text = torch.zeros(ctx.slots, dtype=torch.int64, device=ctx.device)
        first = torch.zeros_like(text, dtype=torch.int32)
        self._writing, self._one_group = Writing(text, first), first.clone()
        return SlotState({"text": text, "first": first})

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def propose(self, step: ProposeInput) -> Draft:
        """Past what the match answers for the confidence is 0, and the text is continued all the
        same: shapes are fixed, and a wrong draft costs no more than none."""
        ends = step.history, step.slots, step.start
        groups, count = self._groups(step), step.num_verify_tokens - 1
        tokens, confidence = suffix_drafts(self._corpus, self._rule, ends, groups, count)
        return Draft(tokens, confidence=confidence)

    def observe(self, step: ObserveInput) -> None:
        if self._adds and step.phase is not Phase.PREFILL:  # prompts are not added
            ends, sizes = (step.history, step.slots, step.start), (step.q_lens[0], self._rule.depth)
            groups = self._groups(step)
            append(self._corpus, self._writing, ends, step.num_committed, sizes, groups)

    def _groups(self, step: ProposeInput | ObserveInput) -> Tensor:
        """[slots] int32: requests see each other's texts where these are equal."""
        return step.tenants if self._per_key else self._one_group
