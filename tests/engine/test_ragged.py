"""Ragged verify passes: the text of plain decoding, however the tokens are divided."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import SamplingParams
from forerun.attention.base import HostBatch
from forerun.core.errors import ConfigError
from forerun.executor import device_executor
from forerun.executor.device_executor import DeviceExecutor, device_step
from forerun.executor.graphs import cuda
from forerun.executor.graphs.cpu import CpuGraphSteps
from forerun.executor.graphs.cuda import CudaGraphSteps
from forerun.executor.graphs.steps import DecodeBatch
from forerun.executor.step import device_step as device_step_module
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.inputs import DecodeInput
from forerun.executor.step.reliability import confidence_counts
from forerun.kernels.cpu import library
from forerun.sampling.sampler import SAMPLED, SamplingFlags
from forerun.scheduler.adaptive_width import FixedWidth
from forerun.speculative.base import Draft, ProposeInput
from forerun.speculative.ragged.allocate import allocate
from tests.engine import test_grammars, test_logits
from tests.engine.test_logits import CapturedSteps
from tests.engine.test_matrix import (
    GREEDY,
    SEEDED,
    WIDTHS,
    batches,
    generate,
    params,
    prompts,
    reference,
)
from tests.engine_runs import run_together
from tests.golden_engine import golden_llm
from tests.ragged import SETTINGS, choose_at_random, divide_at_random
from tests.toy_algorithms import Sampler, register_toys

register_toys()
OWN: dict[str, dict[str, Any]] = {**WIDTHS, "DDTREE": {"speculative_ddtree_budget": 12}}


@pytest.mark.covering(1, 4)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (16, 512)])
@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM", "SUFFIX", "DFLASH,SUFFIX", "DDTREE"])
def test_output_equals_plain_decoding(
    algorithm: str,
    page_size: int,
    chunk: int,
    backend: str,
    overlap_depth: int,
    tight: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend == "cpu" and library.library() is None:
        pytest.skip("without our kernels there is no such backend")
    settings = {"page_size": page_size, "chunked_prefill_size": chunk, **SETTINGS}
    settings |= {"attention_backend": backend, "overlap_depth": overlap_depth}
    if tight:
        settings["max_total_tokens"] = {1: 120, 16: 128}[page_size]
    division = divide_at_random(monkeypatch)
    asked = prompts(page_size, tight)
    with golden_llm(algorithm, **OWN.get(algorithm, {}), **settings) as llm:
        wants = [reference(page_size, tight, sampled) for sampled in (False, True)]
        for sampled in batches(len(asked)):
            kinds = [params(SEEDED if each else GREEDY, i) for i, each in enumerate(sampled)]
            # One takes no drafts, one hardly any.
            kinds[1]["speculative"], kinds[2]["max_draft_tokens"] = False, 1
            for _ in range(2):  # the same prompts again: prefix hits
                got = generate(llm, asked, kinds, tight)
                assert [each[0] for each in got] == [wants[s][i] for i, s in enumerate(sampled)]
        llm.engine.check()
        assert llm.stats()["spec_decode_num_accepted_tokens"] > 0
    assert any(len(set(widths)) > 1 for widths in division.seen)


@pytest.mark.covering(0, 1)
@pytest.mark.parametrize("algorithm", ["DDTREE", "NGRAM", "DFLASH"])
def test_penalties_and_logprobs(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    division = divide_at_random(monkeypatch)
    with golden_llm(algorithm, **OWN.get(algorithm, {}), **SETTINGS) as llm:
        for preempts in (False, True):
            test_logits.compare(test_logits.run(llm, preempts), test_logits.reference())
        llm.engine.check()
    assert any(len(set(widths)) > 1 for widths in division.seen)


@pytest.mark.exhaustive
@pytest.mark.covering(0, 1)
@pytest.mark.parametrize("algorithm", ["NGRAM", "DFLASH"])
def test_structured_output(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    division = divide_at_random(monkeypatch)
    with test_grammars.bundled_llm(algorithm, **SETTINGS) as llm:
        for preempts in (False, True):
            assert test_grammars.run(llm, preempts) == test_grammars.reference()
        llm.engine.check()
    assert any(len(set(widths)) > 1 for widths in division.seen)


@pytest.mark.covering(0)
@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM"])
def test_equal_widths_are_a_uniform_pass(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts are accepted: what `observe` sees of packed tokens is right."""

    def evenly(survival: Tensor, total: int) -> Tensor:
        return allocate(torch.zeros_like(survival), total)

    monkeypatch.setattr(device_step_module, "allocate", evenly)
    accepted = []
    for ragged in (False, True):
        with golden_llm(algorithm, **{**SETTINGS, "speculative_ragged_verify": ragged}) as llm:
            llm.engine.scheduler.widths = FixedWidth((1, 4))
            asked = [*map(list, prompts(16, False))]
            requests = [
                llm.engine.make_request(ids, SamplingParams.of(params(GREEDY, i)))
                for i, ids in enumerate(asked)
            ]
            run_together(llm.engine, requests)
            accepted.append([each.accept_lengths for each in requests])
            proposed = sum(each.proposed for each in requests)
            assert proposed == 3 * sum(each.verify_ct for each in requests)
    assert accepted[0] == accepted[1]
    assert max(max(each) for each in accepted[0]) == 4


@pytest.mark.exhaustive
@pytest.mark.covering(0, 1)
@pytest.mark.parametrize("algorithm", ["NGRAM", "DFLASH", "DDTREE"])
@pytest.mark.usefixtures("without_cpu_kernels")
def test_captured_passes(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in two parts; batches of three are filled up with padding."""
    choose_at_random(monkeypatch)
    monkeypatch.setattr(cuda, "DRAFTING_BATCH", 2)
    own = {**OWN.get(algorithm, {}), "page_size": 16, "overlap_depth": 1}
    with golden_llm(algorithm, **own, **SETTINGS) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        steps = CapturedSteps(executor.step, llm.engine.info.verify_widths)
        executor.steps = steps
        for sampled, kind in enumerate((GREEDY, SEEDED)):
            kinds = [params(kind, i) for i in range(3)]
            kinds[1]["max_draft_tokens"] = 1
            got = generate(llm, prompts(16, False)[:3], kinds, False)
            assert [each[0] for each in got] == reference(16, False, bool(sampled))[:3]
        test_logits.compare(test_logits.run(llm, which=range(3)), test_logits.reference()[:3])
        llm.engine.check()
        assert llm.stats()["spec_decode_num_accepted_tokens"] > 0
    replayed = [key for key in steps.replays if key.size == 4 and key.rows]
    assert len({key.rows for key in replayed}) > 1
    some = {0, 2} if steps.drafts_for_some else {0}
    assert {key.drafting for key in replayed} == some


@pytest.mark.covering(0)
@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM"])
def test_passes_recorded_on_a_cpu(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.library() is None:
        pytest.skip("only our kernels are recorded")
    choose_at_random(monkeypatch)
    own = {"page_size": 16, "attention_backend": "cpu", "overlap_depth": 1}
    with golden_llm(algorithm, **own, **SETTINGS) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        steps = executor.steps
        assert isinstance(steps, CpuGraphSteps)
        for sampled, kind in enumerate((GREEDY, SEEDED)):
            kinds = [params(kind, i) for i in range(3)]
            got = generate(llm, prompts(16, False)[:3], kinds, False)
            assert [each[0] for each in got] == reference(16, False, bool(sampled))[:3]
        llm.engine.check()
    ragged = [key for key, kept in steps.recorded.items() if key.shape.num_rows and kept]
    assert len(ragged) > 2


def test_the_graph_of_a_pass_has_room_for_its_padding() -> None:
    with golden_llm("NGRAM", **SETTINGS) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        full = llm.engine.limits.max_verify_tokens
        steps = CudaGraphSteps(executor.step, 64, 8, llm.engine.info.verify_widths)
        assert steps.shapes[8] == [(1, 0), (full, 16), (full, 32), (full, 0)]
        shape = {"kv_len_ub": 64, "flags": SamplingFlags(), "lengths": HostBatch([0] * 5)}

        def rows(wanted: int, width: int = full) -> int:
            found = steps._pass_of(DecodeBatch(range(5), width, num_rows=wanted, **shape), 8)
            assert (found.size, found.width) == (8, width)
            return found.rows

        # Greedy requests have graphs of their own where there are few.
        for wanted, flags in ((0, SamplingFlags()), (16, SAMPLED)):
            batch = DecodeBatch(range(8), full, num_rows=wanted, **shape)
            assert steps._graph_of(batch, 8)[1] == flags
        assert steps.num_decode([8]) == 2 + 1 + 1 + 2
        assert rows(0, 1) == 0 and rows(0) == 0
        assert [rows(wanted) for wanted in (6, 13, 14, 29, 30)] == [16, 16, 32, 32, 0]


@pytest.mark.exhaustive
def test_a_graph_whose_drafts_are_cut_holds_smaller_passes() -> None:
    with golden_llm("DFLASH", **SETTINGS) as llm:
        executor, limits = llm.engine.executor, llm.engine.limits
        assert isinstance(executor, DeviceExecutor) and limits.max_verify_tokens == 10
        steps = CudaGraphSteps(executor.step, 64, 4, llm.engine.info.verify_widths)
        assert steps.shapes[1] == [(1, 0), (2, 0), (4, 0), (10, 8), (10, 0)]
        assert steps.shapes[2] == [(1, 0), (4, 4), (10, 8), (10, 16), (10, 0)]
        assert steps.shapes[4] == [(1, 0), (10, 8), (10, 16), (10, 32), (10, 0)]
        rest = {"kv_len_ub": 64, "flags": SamplingFlags(), "lengths": HostBatch([0] * 3)}
        for batch, size in ((1, 1), (2, 2), (3, 4), (1, 2)):
            for width in llm.engine.info.verify_widths:
                wanted, rows = limits.verify_shape(batch, width)
                asked = DecodeBatch(range(batch), wanted, num_rows=rows, **rest)
                found = steps._pass_of(asked, size)
                assert (found.width, found.rows) in steps.shapes[size]
                padding = size - batch if found.rows else 0
                tokens = (found.rows or batch * found.width) - padding
                assert found.width >= wanted and tokens >= (rows or batch * wanted)


def test_drafts_are_made_for_some_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The algorithm is asked for the first ones; the others count as not verified."""
    asked: list[tuple[int, int]] = []
    propose = DeviceStep._propose_for_some

    def recorded(step: DeviceStep, given: DecodeInput) -> Draft:
        draft = propose(step, given)
        asked.append((given.shape.num_drafting, len(draft.tokens)))
        return draft

    divide_at_random(monkeypatch)
    monkeypatch.setattr(DeviceStep, "_propose_for_some", recorded)
    with golden_llm("DFLASH", **SETTINGS) as llm:
        costs = llm.engine.info.draft_costs or {}
        assert set(costs) == {2, 4, 10} and 1 in costs[10]
        asked.clear()
        kinds = [params(GREEDY, i) for i in range(len(prompts(16, False)))]
        for _ in range(2):
            got = generate(llm, prompts(16, False), kinds, False)
            assert [each[0] for each in got] == reference(16, False, False)
        estimator = device_step(llm.engine.executor).estimator
        assert estimator is not None and int(estimator.counts[:, 0].sum()) > 0
        llm.engine.check()
    assert len(asked) > 3 and all(0 < some < batch for some, batch in asked)
    with golden_llm("TOY-TREES", **SETTINGS) as llm:
        assert llm.engine.info.draft_costs is None


def test_a_request_never_commits_more_than_it_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated acceptance too, which does not compare drafts."""
    division = divide_at_random(monkeypatch)
    committed: list[list[int]] = []
    commit = DeviceStep.commit

    def record(self: DeviceStep, *args: Any) -> Any:
        out = commit(self, *args)
        if out.widths is not None:
            committed.append(out.num_committed.tolist())
        return out

    monkeypatch.setattr(DeviceStep, "commit", record)
    with golden_llm("DFLASH", speculative_simulate_accept_length=3.0, **SETTINGS) as llm:
        assert device_step(llm.engine.executor).simulate is not None
        llm.generate(input_ids=prompts(16, False), sampling_params=[params(GREEDY, 0)] * 5)
    pairs = [
        pair
        for widths, counts in zip(division.seen[-len(committed) :], committed, strict=True)
        for pair in zip(widths, counts, strict=True)
    ]
    assert all(1 <= count <= min(width, 3) for width, count in pairs)
    assert any(count == 3 for _, count in pairs)
    assert any(count == width < 3 for width, count in pairs)


def test_the_confident_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the confidences that come with the drafts."""
    given: list[list[int]] = []

    def divide(survival: Tensor, total: int) -> Tensor:
        widths = allocate(survival, total)
        given.append(widths.tolist())  # so the step is not recorded, which would not call this
        return widths

    def propose(self: Sampler, step: ProposeInput) -> Draft:
        tokens = self.back(step, 3, step.num_verify_tokens - 1)
        sure = (step.slots % 2).float().unsqueeze(1).expand(tokens.shape)
        return Draft(tokens, confidence=0.1 + 0.8 * sure)

    monkeypatch.setattr(device_step_module, "allocate", divide)
    monkeypatch.setattr(Sampler, "propose", propose)
    with golden_llm("TOY-SAMPLER", **SETTINGS) as llm:
        given.clear()  # step costs have been measured
        llm.engine.scheduler.widths = FixedWidth((1, 4))
        rules = [{"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}] * 2
        llm.generate(input_ids=prompts(16, False)[:2], sampling_params=rules)
    widths = [sorted(each) for each in given if len(each) == 2]
    assert len(widths) > 2 and all(sum(each) == 8 for each in widths)
    assert max(each[1] for each in widths) > 4


@pytest.mark.parametrize(
    ("algorithm", "settings", "why"),
    [
        (None, {}, "needs drafts"),
        ("NGRAM", {"speculative_adaptive": False}, "needs speculative_adaptive"),
    ],
)
def test_refusals(algorithm: str | None, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_ragged_verify {why}"):
        golden_llm(algorithm, **{**SETTINGS, **settings})


def test_when_survivals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few steps, as they are after the step, whatever later ones learn."""
    monkeypatch.setattr(device_executor, "SURVIVAL_STEPS", 5)
    monkeypatch.setattr(device_executor, "DRAFTING_BATCH", 0)  # as on a GPU
    with golden_llm("DFLASH", **SETTINGS) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        told = []
        for step in range(1, 11):
            executor._decode_steps = step
            told.append(executor._due_survivals([0, 1], True))
        assert [each is not None for each in told] == [0, 0, 0, 0, 1] * 2
        due, estimator = told[4], executor.step.estimator
        assert due is not None and estimator is not None
        rows = device_executor._with_new(*(each.tolist() for each in due))
        estimator.prior.zero_()
        assert device_executor._with_new(*(each.tolist() for each in due)) == rows
        assert len(rows) == 3 and rows[0] == [0.0] * len(rows[0])  # a slot without a request
        assert all(0 < b < a <= 1 for a, b in pairwise(rows[2]))


def test_counts_of_estimated_rates_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are after the step: tested drafts, accepted ones, the sum of rates of the bin."""
    monkeypatch.setattr(device_executor, "CONFIDENCE_STEPS", 1)
    choose_at_random(monkeypatch)
    with golden_llm("DFLASH", **SETTINGS) as llm:
        generate(llm, prompts(16, False), [params(GREEDY, i) for i in range(5)], False)
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        copies, estimator = executor._due_confidences(), executor.step.estimator
        assert copies is not None and estimator is not None
        told = confidence_counts(*copies)
        estimator.counts.zero_()
        executor.step.reliability.counts.fill_(1)
        assert confidence_counts(*copies) == told == llm.engine.metrics().confidences
    bins = len(told.estimated)
    assert sum(drafts for drafts, *_ in told.estimated) > 50
    for i, (drafts, accepted, total) in enumerate(told.estimated):
        assert 0 <= accepted <= drafts
        assert i / bins - 1e-5 <= total / max(drafts, 1) <= (i + 1) / bins + 1e-5 or not drafts
