"""Two algorithms as one: each drafts, and per request and step the better-scored draft is proposed.

A score is the number of drafts that are expected to be accepted. An algorithm with confidences
promises the sum of their running products, one without promises all of its drafts; what it promises
is multiplied by the share of its earlier promises to the request that were kept. Both are compared
with what was committed, whichever was proposed. Of equal scores the first algorithm's draft wins.
Where one of them has confidences, those of the other's drafts are the share of its earlier drafts
that were accepted, of those that were tested.
(The hybrid of suffix decoding, arXiv 2411.04975, with a measured instead of a fixed threshold.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.speculative.base import (
    Draft,
    DraftContext,
    ObserveInput,
    Phase,
    ProposeInput,
    SlotContext,
    SlotState,
    SpecCaps,
    SpeculativeAlgorithm,
)
from forerun.speculative.check import one_line_error, resolve_caps, slot_tensors
from forerun.speculative.check_draft import checked_draft

FADES = 0.9  # weight of a step's promises in the next step
NO_TOKEN = -1


def join(first: type[SpeculativeAlgorithm], second: type[SpeculativeAlgorithm]) -> type[Joined]:
    """The class of two algorithms together; only the first may have a draft model."""
    both = (first, second)
    of_draft = ("bundled_draft", "shards_draft", "quantizes_draft")
    body = {"parts": both} | {name: getattr(first, name) for name in of_draft}
    options = {option.name: option for each in both for option in each.options}
    body["options"] = tuple(options.values())
    return type(f"{first.__name__}And{second.__name__}", (Joined,), body)


class Joined(SpeculativeAlgorithm):
    parts: ClassVar[tuple[type[SpeculativeAlgorithm], ...]] = ()

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        first, second = cls._caps(config, target, dtype)
        if not first.num_drafts or not second.num_drafts:
            raise ConfigError(
                f"speculative_algorithm {config.speculative_algorithm}: one of the two drafts"
                " nothing; name the other one alone."
            )
        if second.draft_kv is not None or second.target_layers:
            raise ConfigError("Of two algorithms only the first may have a draft model; swap them.")
        if first.makes_trees or second.makes_trees:
            raise ConfigError("Two algorithms are joined as chains; choose one without trees.")
        drafts = max(first.num_drafts, second.num_drafts)
        return replace(
            first,
            num_drafts=drafts,
            flexible=first.flexible and second.flexible,
            kv_reserve=max(first.kv_reserve, second.kv_reserve, drafts + 1),
            needs_host_tokens=first.needs_host_tokens or second.needs_host_tokens,
            reads_hidden_states=first.reads_hidden_states or second.reads_hidden_states,
            deferred_observe=first.deferred_observe and second.deferred_observe,
            observes_packed=first.observes_packed and second.observes_packed,
        )

    @classmethod
    def _caps(
        cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype
    ) -> tuple[SpecCaps, SpecCaps]:
        first, second = cls.parts
        own, others = _configs(config)
        return (
            resolve_caps(first, own, target, dtype),
            resolve_caps(second, others, target, dtype),
        )

    def load(self, ctx: DraftContext) -> None:
        configs = _configs(ctx.config)
        self._caps_of = self._caps(ctx.config, ctx.target.config, ctx.dtype)
        self._joined: list[SpeculativeAlgorithm] = []
        for cls, config, caps in zip(self.parts, configs, self._caps_of, strict=True):
            with one_line_error(cls):
                part = cls()
            with one_line_error(cls, ".load"):
                part.load(replace(ctx, config=config, caps=caps))
            self._joined.append(part)
        self._num_drafts = ctx.caps.num_drafts

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        """States of both; their last drafts and promises, and the promises made and kept."""
        tensors = {
            f"{i}.{name}": tensor
            for i, each in enumerate(self._joined)
            for name, tensor in slot_tensors(each, ctx).items()
        }
        shape = (ctx.slots, len(self._joined))
        self._drafts = torch.zeros(*shape, self._num_drafts, dtype=torch.int64, device=ctx.device)
        self._promise = torch.zeros(shape, device=ctx.device)
        counts = torch.zeros(3, *shape, device=ctx.device)
        self._made, self._kept, self._tested = counts  # promises, accepted and tested drafts
        own = {"drafts": self._drafts, "promise": self._promise}
        counted = {"made": self._made, "kept": self._kept, "tested": self._tested}
        return SlotState({**tensors, **own, **counted})

    def supports_target_verify_for_draft(self) -> bool:
        return all(each.supports_target_verify_for_draft() for each in self._joined)

    def propose(self, step: ProposeInput) -> Draft:
        count, slots = step.num_verify_tokens - 1, step.slots
        found = [
            self._drafted(each, caps, step)
            for each, caps in zip(self._joined, self._caps_of, strict=True)
        ]
        tokens = torch.stack([each.tokens for each in found], 1)  # [B, 2, K]
        promise = torch.stack([_promised(each) for each in found], 1)  # [B, 2]
        self._drafts[slots, :, :count] = tokens
        self._promise[slots] = promise
        # A request begins as if one whole draft had been promised and half of it kept.
        score = promise * (self._kept[slots] + count / 2) / (self._made[slots] + count)
        better = (score[:, 1] > score[:, 0]).unsqueeze(1)
        chosen = torch.where(better, tokens[:, 1], tokens[:, 0])
        if all(each.confidence is None for each in found):
            return Draft(chosen)
        rate = ((self._kept[slots] + 0.5) / (self._tested[slots] + 1)).unbind(1)
        known = [
            (each.tokens != NO_TOKEN) * rate[i].unsqueeze(1)
            if each.confidence is None
            else each.confidence
            for i, each in enumerate(found)
        ]
        return Draft(chosen, confidence=torch.where(better, known[1], known[0]))

    def _drafted(self, part: SpeculativeAlgorithm, caps: SpecCaps, step: ProposeInput) -> Draft:
        """K drafts of a part: NO_TOKEN, which has confidence 0, where it makes fewer.

        Raises:
            TypeError: its draft is invalid; names its class.
        """
        own = _narrowed(step, caps)
        shape = (len(step.slots), own.num_verify_tokens - 1)
        given = part.propose(own)
        try:
            draft = checked_draft(given, shape, step.slots.device, trees=False)
        except TypeError as error:
            raise TypeError(f"{type(part).__name__}: {error}") from None
        more = step.num_verify_tokens - own.num_verify_tokens
        confidence = draft.confidence
        if confidence is not None:
            confidence = pad(confidence, (0, more))
        return Draft(pad(draft.tokens, (0, more), value=NO_TOKEN), confidence=confidence)

    def propose_row_layouts(self, step: ProposeInput) -> Tensor:
        """Those of the first algorithm, the one with a draft model."""
        return self._joined[0].propose_row_layouts(_narrowed(step, self._caps_of[0]))

    def observe(self, step: ObserveInput) -> None:
        if step.phase is Phase.VERIFY and step.q_lens[0] > 1:
            self._count_kept(step)
        for each in self._joined:
            each.observe(step)

    def _count_kept(self, step: ObserveInput) -> None:
        """Compares both drafts with what was committed."""
        width, slots = step.q_lens[0], step.slots
        offsets = torch.arange(width - 1, device=slots.device)
        following = step.next_ids if step.rows is None else step.rows.unpack(step.next_ids)
        committed = following.view(len(slots), 1, width)[:, :, :-1]
        drafts = self._drafts[slots, :, : width - 1]
        known = step.num_committed.view(-1, 1, 1)
        kept = ((drafts == committed) & (offsets < known)).cumprod(2).sum(2)
        tested = torch.minimum(((drafts != NO_TOKEN) & (offsets < known)).sum(2), kept + 1)
        self._kept[slots] = self._kept[slots] * FADES + kept
        self._tested[slots] = self._tested[slots] * FADES + tested
        self._made[slots] = self._made[slots] * FADES + self._promise[slots]


def _promised(draft: Draft) -> Tensor:
    """[B] float32: how many of its drafts an algorithm expects to be accepted."""
    if draft.confidence is None:
        return (draft.tokens != NO_TOKEN).sum(1, dtype=torch.float32)
    return draft.confidence.cumprod(1).sum(1)


def _narrowed(step: ProposeInput, caps: SpecCaps) -> ProposeInput:
    """The step of an algorithm that has fewer drafts."""
    width = min(step.num_verify_tokens, caps.num_drafts + 1)
    positions = step.positions.view(len(step.slots), -1)[:, :width].flatten()
    return replace(step, num_verify_tokens=width, positions=positions)


def _configs(config: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """The settings of each: the draft model is the first's, the number of tokens the second's."""
    return (
        replace(config, speculative_num_draft_tokens=None),
        replace(config, speculative_draft_model_path=None),
    )
