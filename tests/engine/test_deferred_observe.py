"""Deferred observe of plain steps: the drafts are those of an engine that observes every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM
from forerun.executor.device_executor import DeviceExecutor, device_step
from forerun.executor.graphs.cuda import CudaGraphSteps
from forerun.executor.graphs.steps import DecodeBatch, DeferredBatch, EagerSteps
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.inputs import DecodeOutput, PrefillBatch, PrefillTokens
from forerun.kernels.speculation.ring_buffer import ring_buffer_write
from forerun.scheduler.adaptive_width import FixedWidth
from forerun.speculative import registry
from forerun.speculative.base import Draft, ProposeInput
from tests.engine.test_algorithms import GREEDY, PROMPTS
from tests.golden_engine import golden_llm
from tests.stand_in_graphs import StandInRecorder

NAMES = ["DFLASH", "DDTREE", "EAGLE3", "NEXTN", "STANDALONE"]
# Which steps decode does not depend on the time that others have taken.
SETTINGS = {"speculative_adaptive": True, "max_running_requests": 3, "max_mixed_step_ms": 0}
Proposals = dict[tuple[int, int], list[int]]  # (request, position) -> drafts
Turn = tuple[list[list[int]], list[list[int]], Proposals]  # texts, accept lengths, drafts


def engine(name: str, chain_llm: Callable[..., LLM], **settings: Any) -> LLM:
    settings = {**SETTINGS, **settings}
    make = golden_llm if name in ("DFLASH", "DDTREE") else chain_llm
    return make(name, **settings)


def record(llm: LLM, prompts: list[list[int]], seed: int) -> Turn:
    """With widths that depend on the seed alone."""
    widths, step = llm.engine.scheduler.widths, llm.engine.executor.step
    rng, proposals = random.Random(seed), {}
    indices: list[int] = []

    def choose(requests: list[Any], max_index: int) -> int:
        if not indices:  # runs of plain steps, also longer than the ring buffer
            plain, drafted = rng.choice([1, 2, 7, 16, 17, 40]), rng.choice([1, 2])
            indices.extend([0] * plain + [max_index] * drafted)
        return widths.widths[indices.pop(0)]

    widths._choose = choose  # type: ignore[method-assign, assignment]
    propose = step.algorithm.propose

    def recorded(of: ProposeInput) -> Draft:
        draft = propose(of)
        owner = {r.slot: r for r in llm.engine.scheduler.running}
        for slot, start, tokens in zip(
            *(each.tolist() for each in (of.slots, of.start, draft.tokens)), strict=True
        ):
            if slot in owner:
                proposals[prompts.index(list(owner[slot].prompt)), start] = tokens
        return draft

    step.algorithm.propose = recorded  # type: ignore[method-assign]
    outs = llm.generate(input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": 48})
    step.algorithm.propose = propose  # type: ignore[method-assign]
    llm.engine.check()
    lengths = [o.meta_info["spec_accept_lengths"] for o in outs]
    return [o.output_ids for o in outs], lengths, proposals


def conversation(llm: LLM) -> list[Turn]:
    """Two turns; the second finds the first in the prefix cache."""
    turns, prompts = [], PROMPTS
    for seed in range(2):
        turns.append(record(llm, prompts, seed))
        prompts = [p + text for p, text in zip(prompts, turns[-1][0], strict=True)]
    return turns


@pytest.fixture(scope="module")
def usual(chain_llm: Callable[..., LLM]) -> Callable[[str, int], list[Turn]]:
    """The conversation with an engine that is as usual, by algorithm and overlap depth."""

    @cache
    def run(name: str, overlap_depth: int) -> list[Turn]:
        with engine(name, chain_llm, overlap_depth=overlap_depth, disable_cuda_graph=True) as llm:
            assert device_step(llm.engine.executor).captures_drafts
            turns = conversation(llm)
        assert turns[0][2]
        return turns

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_captured_steps_equal_eager_steps(name: str, chain_llm: Callable[..., LLM]) -> None:
    seen = []
    for disabled in (False, True):  # 7: batches that are padded to a bucket
        settings = {"disable_cuda_graph": disabled, "max_running_requests": 7}
        with engine(name, chain_llm, overlap_depth=1, **settings) as llm:
            if not disabled:
                steps = llm.engine.executor.steps  # type: ignore[attr-defined]
                assert sorted(steps.observes) == steps.sizes
            seen.append([turn[:2] for turn in conversation(llm)])
    assert seen[0] == seen[1]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(("overlap_depth", "page_size"), [(0, 16), (1, 1)], ids=["sync", "overlap"])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_equal_those_without_deferring(
    name: str,
    overlap_depth: int,
    page_size: int,
    chain_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"overlap_depth": overlap_depth, "page_size": page_size, "disable_cuda_graph": True}
    with engine(name, chain_llm, **settings) as llm:
        assert llm.engine.limits.max_pending_observe == min(16, llm.engine.limits.max_verify_tokens)
        deferred = conversation(llm)
    monkeypatch.setattr("forerun.executor.resolve.MAX_PENDING_OBSERVE", 0)
    with engine(name, chain_llm, **settings) as llm:
        assert llm.engine.limits.max_pending_observe == 0
        at_once = conversation(llm)
    for got, want in zip(deferred, at_once, strict=True):
        assert got[2] and got == want


def run_eagerly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`propose` and `observe` outside of the captured step."""
    cls = registry.get_algorithm(name)
    monkeypatch.setattr(cls, "supports_target_verify_for_draft", lambda self: False)


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("name", NAMES)
def test_eager_drafts_are_those_of_captured_ones(
    name: str,
    overlap_depth: int,
    usual: Callable[[str, int], list[Turn]],
    chain_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU nothing is captured: this is about how the step is cut, not about graphs."""
    want = usual(name, overlap_depth)
    run_eagerly(name, monkeypatch)
    with engine(name, chain_llm, overlap_depth=overlap_depth) as llm:
        assert not device_step(llm.engine.executor).captures_drafts
        assert conversation(llm) == want


@pytest.mark.gpu
@pytest.mark.parametrize("deferred", [False, True], ids=["at-once", "deferred"])
@pytest.mark.parametrize("name", NAMES)
def test_eager_drafts_around_captured_verify_passes(
    name: str, deferred: bool, chain_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accept lengths too: a draft model that reads another step's state would lose them."""
    if not deferred:
        monkeypatch.setattr("forerun.executor.resolve.MAX_PENDING_OBSERVE", 0)
    found = []
    for eager in (False, True):
        if eager:
            run_eagerly(name, monkeypatch)
        # 7: batches that fill no bucket
        with engine(name, chain_llm, overlap_depth=1, max_running_requests=7) as llm:
            steps = llm.engine.executor.steps  # type: ignore[attr-defined]
            assert steps.captured and bool(steps.observes) is (deferred and not eager)
            found.append([turn[:2] for turn in conversation(llm)])
    assert found[0] == found[1]


class PaddedSteps(EagerSteps):
    """Deferred observes are padded by two slots, as in a batch bucket."""

    def observe_deferred(self, batch: DeferredBatch) -> None:
        padding = [self.step.tables.padding_slot] * 2
        slots, counts = [*batch.slots, *padding], [*batch.counts, 0, 0]
        lengths = batch.lengths.padded(len(slots))
        super().observe_deferred(DeferredBatch(slots, counts, batch.kv_len_ub, lengths))


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("name", NAMES)
def test_padding_slots_do_not_change_the_output(
    name: str,
    overlap_depth: int,
    usual: Callable[[str, int], list[Turn]],
    chain_llm: Callable[..., LLM],
) -> None:
    with engine(name, chain_llm, overlap_depth=overlap_depth) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        executor.steps = PaddedSteps(executor.step)
        assert conversation(llm) == usual(name, overlap_depth)
        assert executor.tables.kv_len[executor.tables.padding_slot] == 0


class CapturedObserves(CudaGraphSteps):
    """Deferred observes alone are captured, by a stand-in; batches of up to 4."""

    def __init__(self, step: DeviceStep) -> None:
        super().__init__(step, step.tables.history.shape[1], 4, (1,))
        self.replays = 0
        with torch.inference_mode(), step.dummy_steps():
            for size in reversed(self.sizes):
                self.observes[size] = self._capture_observe(size)

    def _captured(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        recorder = StandInRecorder()
        run()
        recorder.begin()
        output = run()
        again = recorder.end()

        def replay() -> None:
            self.replays += 1
            again()

        return SimpleNamespace(replay=replay), output

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        return self._eager.decode(batch)

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        return self._eager.prefill(batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("without_cpu_kernels")
def test_captured_observes_are_the_eager_ones(name: str, chain_llm: Callable[..., LLM]) -> None:
    found = []
    for captured in (False, True):
        with engine(name, chain_llm, overlap_depth=1) as llm:
            executor = llm.engine.executor
            assert isinstance(executor, DeviceExecutor)
            if captured:
                executor.steps = CapturedObserves(executor.step)
            found.append(conversation(llm))
            assert not captured or executor.steps.replays  # type: ignore[attr-defined]
    assert found[0] == found[1]


def test_only_states_that_are_read_are_kept(
    chain_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def write(buffer: Tensor, slots: Tensor, positions: Tensor, values: Tensor) -> None:
        written.append(values.shape[1])
        ring_buffer_write(buffer, slots, positions, values)

    monkeypatch.setattr("forerun.executor.step.deferred_observe.ring_buffer_write", write)
    for name, finals in (("DFLASH", 0), ("NEXTN", 1), ("STANDALONE", 0)):
        written.clear()
        with engine(name, chain_llm) as llm:
            step = device_step(llm.engine.executor)
            hidden, layers = step.model.config.hidden_size, len(step.caps.target_layers)
            executor = llm.engine.executor
            assert isinstance(executor, DeviceExecutor)
            executor.steps = EagerSteps(step)
            llm.engine.scheduler.widths = FixedWidth((1,))
            written.clear()
            llm.generate(input_ids=[PROMPTS[0]], sampling_params={**GREEDY, "max_new_tokens": 3})
        states = [hidden] * finals + [hidden * layers] * (layers > 0)
        assert written == 2 * states, name
