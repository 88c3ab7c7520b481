"""The input of `observe`, compared with plain decoding: tokens and hidden states in text order.

A plugin records every call. Most of its drafts are correct, so that long tree paths with branches
are accepted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from forerun import LLM
from forerun.attention.base import Mask
from forerun.executor.device_executor import device_step
from forerun.executor.graphs.steps import EagerSteps
from forerun.executor.memory import profiling_plans
from forerun.executor.step.inputs import PrefillBatch, PrefillTokens, StepShape
from forerun.speculative import registry
from forerun.speculative.base import (
    Draft,
    DraftContext,
    ObserveInput,
    Phase,
    ProposeInput,
    SlotContext,
    SlotState,
    SpecCaps,
)
from tests.golden_engine import CASES, golden_llm
from tests.toy_algorithms import DRAFTS, Toy

KEY = 8  # first tokens of a prompt, by which it is identified
PROMPTS = [c["prompt"] for c in CASES if len(c["prompt"]) >= KEY][:5]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 40}
LAYERS = (0, 1)


@dataclass(frozen=True)
class Token:
    """A committed token, as passed to `observe`."""

    phase: Phase
    input_id: int
    next_id: int
    hidden_state: Tensor
    aux_hidden_state: Tensor


class Recorder(Toy):
    """Plain decoding (K = 0) that records its own hidden states."""

    caps = SpecCaps(target_layers=LAYERS)

    def load(self, ctx: DraftContext) -> None:
        super().load(ctx)
        # (first tokens of the prompt) -> position -> what was seen there, in order of the calls
        self.seen: dict[tuple[int, ...], dict[int, list[Token]]] = {}
        self.dummies = 0
        self.tokens_after_commit = 0

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        self.padding_slot = ctx.padding_slot
        self.observed = torch.zeros(ctx.slots, dtype=torch.int64, device=ctx.device)
        return SlotState({"observed": self.observed})

    def observe(self, step: ObserveInput) -> None:
        slots = step.slots.tolist()
        assert sum(step.q_lens) == len(step.input_ids) == len(step.hidden_states)
        assert not step.dummy or set(slots) == {self.padding_slot}
        self.observed.index_add_(0, step.slots, step.num_committed.long())
        self.dummies += step.dummy
        at = 0
        for i, (slot, q_len) in enumerate(zip(slots, step.q_lens, strict=True)):
            if slot != self.padding_slot:
                self._record(step, i, at)
            at += q_len

    def _record(self, step: ObserveInput, i: int, at: int) -> None:
        start, count = int(step.start[i]), int(step.num_committed[i])
        assert 1 <= count <= step.q_lens[i]
        self.tokens_after_commit += step.q_lens[i] - count
        assert step.last_index[i] == at + count - 1
        positions = list(range(start, start + count))
        assert step.positions[at : at + count].tolist() == positions
        seen = self.seen.setdefault(tuple(step.history[step.slots[i], :KEY].tolist()), {})
        assert step.aux_hidden_states is not None
        for j, position in enumerate(positions, at):
            token = Token(
                step.phase,
                int(step.input_ids[j]),
                int(step.next_ids[j]),
                step.hidden_states[j].clone(),
                step.aux_hidden_states[j].clone(),
            )
            seen.setdefault(position, []).append(token)


class KnownText(Recorder):
    """Drafts the known text, with a wrong token at every seventh position."""

    caps = SpecCaps(num_drafts=DRAFTS, kv_reserve=DRAFTS + 1, target_layers=LAYERS)
    texts: ClassVar[list[list[int]]] = []

    def right(self, step: ProposeInput, count: int) -> Tensor:
        """[B, count]."""
        texts = torch.tensor(self.texts, device=self.device)  # [n, length]
        begins = step.history[step.slots, :KEY].long()  # [B, KEY]
        text = texts[(begins.unsqueeze(1) == texts[:, :KEY]).all(-1).int().argmax(-1)]
        at = (step.start.unsqueeze(1) + 1 + torch.arange(count, device=self.device)).long()
        tokens = text.gather(1, at.clamp_max(text.shape[1] - 1))
        return torch.where(at % 7 == 0, (tokens + 1) % self.vocab, tokens)

    def propose(self, step: ProposeInput) -> Draft:
        assert not step.dummy or set(step.slots.tolist()) == {self.padding_slot}
        return Draft(self.right(step, step.num_verify_tokens - 1))


class KnownTree(KnownText):
    """The correct path is nodes 2, 4, 5: accepted tokens are not where a chain has them."""

    caps = replace(KnownText.caps, verify_mask=Mask.CUSTOM)
    parents: ClassVar[list[int]] = [0, 0, 2, 2, 4]

    def propose(self, step: ProposeInput) -> Draft:
        right = self.right(step, 3)
        wrong = (right + 1) % self.vocab
        columns = [wrong[:, 0], right[:, 0], wrong[:, 1], right[:, 1], right[:, 2]]
        return Draft(torch.stack(columns, 1), self.shape.expand(len(right), -1))


def variant(base: type[KnownText], eager: bool, deferred: bool) -> str:
    """The name under which it is registered."""
    name = f"{base.__name__}{'-EAGER' * eager}{'-DEFERRED' * deferred}".upper()
    if name not in registry.algorithm_names():
        members = {
            "supports_target_verify_for_draft": lambda self: not eager,
            "caps": replace(base.caps, deferred_observe=deferred),
        }
        registry.register_algorithm(name, type(name, (base,), members))
    return name


def recorder(llm: LLM) -> Recorder:
    algorithm = device_step(llm.engine.executor).algorithm.algorithm
    assert isinstance(algorithm, Recorder)
    return algorithm


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], list[dict[int, list[Token]]]]:
    """Outputs, and the recorded tokens by position."""
    if "RECORDER" not in registry.algorithm_names():
        registry.register_algorithm("RECORDER", Recorder)
    with golden_llm("RECORDER", disable_radix_cache=True) as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        seen = recorder(llm).seen
    texts = [prompt + out.output_ids for prompt, out in zip(PROMPTS, outs, strict=True)]
    return texts, [seen[tuple(prompt[:KEY])] for prompt in PROMPTS]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("deferred", [False, True], ids=["at-once", "deferred"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("base", [KnownText, KnownTree])
def test_what_is_observed_is_the_text_and_its_hidden_states(
    base: type[KnownText],
    eager: bool,
    overlap_depth: int,
    deferred: bool,
    plain: tuple[list[list[int]], list[dict[int, list[Token]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts, reference = plain
    monkeypatch.setattr(KnownText, "texts", [(t + [0] * 400)[:400] for t in texts])
    settings: dict[str, Any] = {
        "disable_radix_cache": True,  # every position is observed
        "chunked_prefill_size": 16,
        "max_running_requests": 3,
        "overlap_depth": overlap_depth,
        "speculative_adaptive": True,
        "disable_cuda_graph": True,  # `observe` runs in every step
    }
    with golden_llm(variant(base, eager, deferred), **settings) as llm:
        algorithm, widths = recorder(llm), llm.engine.scheduler.widths
        assert not algorithm.seen and (algorithm.dummies > 0) == eager
        turns = iter(range(10**6))  # two wide steps, then four plain ones
        monkeypatch.setattr(
            widths, "_choose", lambda _, most: widths.widths[-(next(turns) % 6 < 2)]
        )
        outs = llm.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert [p + o.output_ids for p, o in zip(PROMPTS, outs, strict=True)] == texts
        lengths = {n for o in outs for n in o.meta_info["spec_accept_lengths"]}
        assert max(lengths) == (4 if base is KnownTree else DRAFTS + 1)
        llm.engine.check()
    phases = {Phase.PREFILL, Phase.VERIFY} | ({Phase.DEFERRED} if deferred else set())
    for text, prompt, want in zip(texts, PROMPTS, reference, strict=True):
        seen = algorithm.seen[tuple(prompt[:KEY])]
        # Plain steps at the end of a text may never be observed; all others are, once.
        known = [p for p in sorted(seen) if p < len(text) - 1]
        assert known == list(range(len(known))) and len(known) >= len(text) - 1 - 5 * deferred
        assert {seen[p][0].phase for p in known} == phases
        for p in known:
            (token,) = seen[p]
            assert (token.input_id, token.next_id) == (text[p], text[p + 1])
            for got, plainly in (
                (token.hidden_state, want[p][0].hidden_state),
                (token.aux_hidden_state, want[p][0].aux_hidden_state),
            ):
                torch.testing.assert_close(got, plainly, rtol=1e-4, atol=1e-4)


class PaddedPrefill(EagerSteps):
    """Prompts of one request are padded to 32 tokens, as by captured prefills."""

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        (chunk,) = batch.chunks
        assert chunk.last and chunk.num_tokens < 32
        tables = self.step.tables
        slots = tables.upload([chunk.slot], torch.int64)
        counts = tables.upload([chunk.num_tokens], torch.int32)
        out = self.step.prefill_padded(slots, counts, StepShape(32, chunk.end + 64, batch.flags))
        self.step.observe_prefill(out)
        return PrefillTokens(out.sampled)


def test_a_padded_prefill_is_observed_with_fewer_committed_tokens(
    plain: tuple[list[list[int]], list[dict[int, list[Token]]]],
) -> None:
    texts, reference = plain
    which = [i for i, prompt in enumerate(PROMPTS) if len(prompt) < 32]
    assert which
    with golden_llm("RECORDER", disable_radix_cache=True, max_running_requests=1) as llm:
        executor, algorithm = llm.engine.executor, recorder(llm)
        executor.steps = PaddedPrefill(device_step(executor))  # type: ignore[attr-defined]
        for i in which:
            out = llm.generate(input_ids=PROMPTS[i], sampling_params=GREEDY)
            assert PROMPTS[i] + out.output_ids == texts[i]
            seen = algorithm.seen[tuple(PROMPTS[i][:KEY])]
            assert sorted(seen)[:-1] == list(range(len(sorted(seen)) - 1))
            for p in range(len(texts[i]) - 1):
                (token,) = seen[p]
                assert (token.input_id, token.next_id) == (texts[i][p], texts[i][p + 1])
                want = reference[i][p][0].hidden_state
                torch.testing.assert_close(token.hidden_state, want, rtol=1e-4, atol=1e-4)
    assert algorithm.tokens_after_commit == sum(32 - len(PROMPTS[i]) for i in which)


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_dummy_steps_reach_no_request(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiling run, as on a GPU: the padding slot's state only, and eager plugins can tell."""
    monkeypatch.setattr(KnownText, "texts", [[0] * 400])
    with golden_llm(variant(KnownText, eager, True), max_running_requests=3) as llm:
        executor, algorithm, limits = llm.engine.executor, recorder(llm), llm.engine.limits
        step = device_step(executor)
        calls: dict[Phase, set[bool]] = defaultdict(set)
        observe = algorithm.observe

        def counted(given: ObserveInput) -> None:
            calls[given.phase].add(given.dummy)
            observe(given)

        monkeypatch.setattr(algorithm, "observe", counted)
        with step.dummy_steps():
            for plan in profiling_plans(limits, (1, limits.max_verify_tokens), limits.slots):
                executor.launch(plan).result()
        assert calls == {phase: {eager} for phase in Phase}
        assert not algorithm.seen and not algorithm.observed[:-1].any()
        calls.clear()
        llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert calls[Phase.PREFILL] == calls[Phase.VERIFY] == {False}
        assert set(algorithm.seen) == {tuple(PROMPTS[0][:KEY])}


@pytest.mark.parametrize(
    ("algorithm", "logprobs", "pruned"),
    [(None, False, True), (None, True, False), ("DFLASH", False, True), ("RECORDER", False, False)],
)
def test_prompts_are_finished_for_the_tokens_that_are_read(
    algorithm: str | None, logprobs: bool, pruned: bool
) -> None:
    """The last layer runs for last tokens alone, unless more hidden states are read."""
    if "RECORDER" not in registry.algorithm_names():
        registry.register_algorithm("RECORDER", Recorder)
    with golden_llm(algorithm, disable_radix_cache=True) as llm:
        step = device_step(llm.engine.executor)
        rows: list[tuple[int, Tensor | None]] = []
        forward = step.model.forward

        def recorded(ids: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
            if len(ids) == len(PROMPTS[0]):
                rows.append((len(ids), args[3]))
            return forward(ids, *args)

        step.model.forward = recorded  # type: ignore[method-assign]
        llm.generate(
            input_ids=PROMPTS[:1],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=logprobs,
            logprob_start_len=0 if logprobs else None,
        )
    ((count, index),) = rows
    assert (index is None) != pruned
    assert index is None or index.tolist() == [count - 1]
