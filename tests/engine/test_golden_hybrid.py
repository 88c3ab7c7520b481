"""The trained hybrid toy: its DFLASH drafts are right as often as in transformers, step by step.

Random hybrids (`test_hybrid_target.py`) hold texts. Here drafts depend on hidden states that a
wrong recurrent state changes, and most steps commit several tokens of it. So the accept length of
every step is held to the reference implementation, wherever the step begins: after a prefix hit, a
preemption, a chunk or a step in flight.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import proxy

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.core.request import Request
from forerun.executor.graphs.cpu import CpuGraphSteps
from forerun.kernels.cpu import library
from forerun_train.toys.hybrid import BLOCK, load_draft, load_target, matches
from tests.engine_runs import run_together
from tests.golden_engine import poison_on_release
from tests.ragged import SETTINGS, divide_at_random
from tests.support_cells import passed

TOY = Path(__file__).resolve().parent.parent / "golden" / "hybrid-toy"
CASES: list[dict[str, Any]] = json.loads((TOY / "cases.json").read_text())
PROMPTS = [case["prompt"] for case in CASES]
TEXTS = [case["output"] for case in CASES]
MATCHES = [case["matches"] for case in CASES]
NEW = len(TEXTS[0])
FIRST, INTERVAL = 40, 32  # tokens of a first turn, and between states that it keeps
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
EXHAUSTIVE = pytest.mark.exhaustive
Step = tuple[int, int]
"""Tokens of the output before a step, and its accept length."""


def toy(algorithm: str | None = "DFLASH", **settings: Any) -> LLM:
    if algorithm in ("DFLASH", "DDTREE"):
        settings["speculative_draft_model_path"] = str(TOY / "draft")
    settings = {"device": "cpu", "dtype": "float32", "speculative_adaptive": False, **settings}
    settings |= {"speculative_algorithm": algorithm, "skip_tokenizer_init": True}
    llm = LLM(TOY / "target", **settings)
    poison_on_release(llm)
    return llm


def params(kind: dict[str, Any], index: int, new: int = NEW) -> dict[str, Any]:
    seed = {} if kind is GREEDY else {"sampling_seed": 100 + index}
    return {**kind, **seed, "max_new_tokens": new, "ignore_eos": True}


def note_steps(llm: LLM) -> dict[str, list[Step]]:
    """The verify steps of every request from now on, by its id."""
    scheduler = llm.engine.scheduler
    append = partial(type(scheduler)._append, proxy(scheduler))
    steps: dict[str, list[Step]] = {}

    def noted(request: Request, *args: Any, **settings: Any) -> Request:
        before, known = len(request.output), len(request.accept_lengths)
        append(request, *args, **settings)
        fresh = request.accept_lengths[known:]
        steps.setdefault(request.rid, []).extend((before, length) for length in fresh)
        return request

    scheduler._append = noted  # type: ignore[method-assign]
    return steps


def hold(
    llm: LLM,
    prompts: list[list[int]],
    kind: dict[str, Any],
    texts: list[list[int]],
    right: list[list[int]] | None,
    preempts: bool = False,
) -> list[Request]:
    """Texts, and the accept length of each step; `right`: of chains, right drafts after each."""
    steps, new = note_steps(llm), len(texts[0])
    requests = [
        llm.engine.make_request(prompt, SamplingParams.of(params(kind, i, new)))
        for i, prompt in enumerate(prompts)
    ]
    run_together(llm.engine, requests, preempts)
    assert [request.output for request in requests] == texts
    # Drafts of other kinds are drawn with the target's noise; `right` counts the likeliest.
    if kind is not GREEDY or right is None:
        return requests
    for request, correct in zip(requests, right, strict=True):
        for before, length in steps[request.rid]:
            assert length == min(correct[before - 1] + 1, new - before), before
    return requests


def accept_length(requests: list[Request]) -> float:
    """Tokens per verify step."""
    lengths = [length for request in requests for length in request.accept_lengths]
    return sum(lengths) / len(lengths)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with toy(page_size=16, chunked_prefill_size=32, mamba_track_interval=INTERVAL) as llm:
        yield llm


def test_the_files_are_small() -> None:
    size = sum(path.stat().st_size for path in TOY.glob("*/model.safetensors"))
    assert size < 1 << 20


def test_plain_decoding_gives_the_texts_of_transformers() -> None:
    with toy(None) as llm:
        how = [params(GREEDY, i) for i in range(len(PROMPTS))]
        outs = llm.generate(input_ids=PROMPTS, sampling_params=how)
        assert [out.output_ids for out in outs] == TEXTS


def test_drafts_are_accepted_as_in_the_reference(llm: LLM) -> None:
    """Cold, with prefix hits, with preemptions; the sum is an accept length worth having."""
    llm.engine.flush_cache()
    cold = hold(llm, PROMPTS, GREEDY, TEXTS, MATCHES)
    assert accept_length(cold) >= 2.5
    warm = hold(llm, PROMPTS, GREEDY, TEXTS, MATCHES)
    assert all(r.cached_tokens >= len(r.prompt) - 16 for r in warm)
    assert accept_length(warm) == accept_length(cold)
    llm.engine.flush_cache()
    hold(llm, PROMPTS, GREEDY, TEXTS, MATCHES, preempts=True)
    llm.engine.check()
    passed(llm, __file__)


def test_another_turn_continues_from_the_snapshot(llm: LLM) -> None:
    """The prompt of before and half its answer: a hit that ends at a state, not at the K/V."""
    half = NEW // 2
    hold(llm, PROMPTS, GREEDY, TEXTS, MATCHES)
    longer = [[*prompt, *text[:half]] for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    rest, right = ([row[half:] for row in rows] for rows in (TEXTS, MATCHES))
    requests = hold(llm, longer, GREEDY, rest, right)
    assert all(r.cached_tokens > 0 for r in requests)


def test_another_turn_continues_from_generated_text(llm: LLM) -> None:
    hold_two_turns(llm, GREEDY, TEXTS, MATCHES)
    llm.engine.check()


@pytest.mark.exhaustive
def test_trees(llm: LLM) -> None:
    """The same texts in fewer steps: cold, with prefix hits, with preemptions, in a second turn."""
    llm.engine.flush_cache()
    chains = hold(llm, PROMPTS, GREEDY, TEXTS, MATCHES)
    settings = {"page_size": 16, "chunked_prefill_size": 32, "mamba_track_interval": INTERVAL}
    with toy("DDTREE", **settings) as trees:
        cold = hold(trees, PROMPTS, GREEDY, TEXTS, None)
        assert accept_length(cold) >= 1.1 * accept_length(chains)
        warm = hold(trees, PROMPTS, GREEDY, TEXTS, None)
        assert all(r.cached_tokens >= len(r.prompt) - 16 for r in warm)
        assert accept_length(warm) == accept_length(cold)
        trees.engine.flush_cache()
        hold(trees, PROMPTS, GREEDY, TEXTS, None, preempts=True)
        hold_two_turns(trees, GREEDY, TEXTS, None)
        trees.engine.check()
        passed(trees, __file__)


@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("algorithm", ["DFLASH", pytest.param("DDTREE", marks=EXHAUSTIVE)])
def test_ragged_passes(algorithm: str, overlap_depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    division = divide_at_random(monkeypatch)
    hold_ragged(algorithm, page_size=16, overlap_depth=overlap_depth)
    assert any(len(set(widths)) > 1 for widths in division.seen)


def hold_ragged(algorithm: str, **settings: Any) -> None:
    """Cold, with prefix hits, with preemptions, in a second turn."""
    settings |= {**SETTINGS, "mamba_track_interval": INTERVAL}
    with toy(algorithm, **settings) as llm:
        for preempts in (False, False, True):
            hold(llm, PROMPTS, GREEDY, TEXTS, None, preempts)
        hold_two_turns(llm, GREEDY, TEXTS, None)
        llm.engine.check()


def hold_two_turns(
    llm: LLM,
    kind: dict[str, Any],
    texts: list[list[int]],
    right: list[list[int]] | None,
    preempts: bool = False,
) -> None:
    """The second turn computes what comes after the last state of the first one, the same text."""
    llm.engine.flush_cache()
    before = llm.engine.metrics().tracked_states
    hold(llm, PROMPTS, kind, [text[:FIRST] for text in texts], right, preempts)
    assert llm.engine.metrics().tracked_states >= before + len(PROMPTS)
    longer = [[*prompt, *text[:FIRST]] for prompt, text in zip(PROMPTS, texts, strict=True)]
    rest = [text[FIRST:] for text in texts]
    further = None if right is None else [row[FIRST:] for row in right]
    requests = hold(llm, longer, kind, rest, further, preempts)
    for request in requests:
        kept = (len(request.prompt) - 1) // INTERVAL * INTERVAL
        if preempts:  # prompts that end in other places leave states of their last whole pages
            assert request.cached_tokens >= kept - llm.engine.limits.page_size
        else:
            assert request.cached_tokens == kept
    assert all(r.cached_tokens > len(p) - 16 for r, p in zip(requests, PROMPTS, strict=True))


# --- the whole matrix -----------------------------------------------------------------------------


@cache
def seeded() -> tuple[list[list[int]], list[list[int]]]:
    """Sampled texts of plain decoding, and the right drafts of the reference after each token."""
    with toy(None, disable_radix_cache=True) as llm:
        texts = [
            llm.generate(input_ids=p, sampling_params=params(SEEDED, i, NEW + BLOCK)).output_ids
            for i, p in enumerate(PROMPTS)
        ]
    target, draft = load_target(TOY / "target"), load_draft(TOY / "draft", TOY / "target")
    right = [
        matches(draft, target, torch.tensor([*prompt, *text]), len(prompt))[:NEW]
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    return [text[:NEW] for text in texts], right


@pytest.mark.exhaustive
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (16, 512)])
def test_accept_length_is_that_of_the_reference(
    page_size: int, chunk: int, overlap_depth: int, tight: bool
) -> None:
    settings: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": chunk}
    if tight:
        settings["max_total_tokens"] = 256
    with toy(**settings, overlap_depth=overlap_depth) as llm:
        preempted = 0
        for kind, (texts, right) in ((GREEDY, (TEXTS, MATCHES)), (SEEDED, seeded())):
            llm.engine.flush_cache()
            for warm in (False,) if tight else (False, True):
                requests = hold(llm, PROMPTS, kind, texts, right, preempts=tight)
                preempted += sum(r.preemptions for r in requests)
                if warm:
                    assert all(r.cached_tokens >= len(r.prompt) - page_size for r in requests)
        assert (preempted > 0) == tight
        llm.engine.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("budget", [5, 64, 150])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
def test_sampled_texts_of_trees(budget: int, overlap_depth: int) -> None:
    texts, _ = seeded()
    settings: dict[str, Any] = {"page_size": 16, "mamba_track_interval": INTERVAL}
    settings |= {"speculative_ddtree_budget": budget, "overlap_depth": overlap_depth}
    with toy("DDTREE", **settings) as llm:
        for kind, want in ((GREEDY, TEXTS), (SEEDED, texts)):
            hold(llm, PROMPTS, kind, want, None)
            hold_two_turns(llm, kind, want, None, preempts=True)
        llm.engine.check()
    with toy("DDTREE", speculative_adaptive=True, **settings) as llm:  # widths as they pay
        for kind, want in ((GREEDY, TEXTS), (SEEDED, texts)):
            hold(llm, PROMPTS, kind, want, None, preempts=True)
        llm.engine.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_two_turns(page_size: int, overlap_depth: int, preempts: bool) -> None:
    settings: dict[str, Any] = {"page_size": page_size, "mamba_track_interval": INTERVAL}
    with toy(**settings, overlap_depth=overlap_depth) as llm:
        for kind, (texts, right) in ((GREEDY, (TEXTS, MATCHES)), (SEEDED, seeded())):
            hold_two_turns(llm, kind, texts, right, preempts)
        llm.engine.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_two_turns_of_other_algorithms(algorithm: str | None, overlap_depth: int) -> None:
    settings: dict[str, Any] = {"page_size": 16, "mamba_track_interval": INTERVAL}
    with toy(algorithm, **settings, overlap_depth=overlap_depth) as llm:
        how = [params(GREEDY, i, FIRST) for i in range(len(PROMPTS))]
        outs = llm.generate(input_ids=PROMPTS, sampling_params=how)
        assert [out.output_ids for out in outs] == [text[:FIRST] for text in TEXTS]
        longer = [[*p, *text[:FIRST]] for p, text in zip(PROMPTS, TEXTS, strict=True)]
        how = [params(GREEDY, i, NEW - FIRST) for i in range(len(PROMPTS))]
        outs = llm.generate(input_ids=longer, sampling_params=how)
        assert [out.output_ids for out in outs] == [text[FIRST:] for text in TEXTS]
        for out, prompt in zip(outs, longer, strict=True):
            assert out.meta_info["cached_tokens"] == (len(prompt) - 1) // INTERVAL * INTERVAL
        llm.engine.check()


@pytest.mark.exhaustive
@pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler")
@pytest.mark.usefixtures("with_cpu_kernels")
def test_recorded_steps_accept_the_same() -> None:
    """As the same kernels eagerly. They take the draft's weights and activations in 8 bits."""
    lengths = []
    for eager in (True, False):
        with toy(speculative_draft_model_quantization="int8", disable_cuda_graph=eager) as llm:
            for _ in range(2):  # recorded, then run again; cold, warm
                how = [params(GREEDY, i) for i in range(len(PROMPTS))]
                outs = llm.generate(input_ids=PROMPTS, sampling_params=how)
                assert [out.output_ids for out in outs] == TEXTS
                lengths.append([out.meta_info["spec_accept_lengths"] for out in outs])
            steps = llm.engine.executor.steps  # type: ignore[attr-defined]
            assert isinstance(steps, CpuGraphSteps) != eager
    assert all(each == lengths[0] for each in lengths)
    flat = [n for each in lengths[0] for n in each]
    assert sum(flat) / len(flat) >= 2.5


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
def test_in_float32_on_a_gpu(overlap_depth: int, graph: bool) -> None:
    settings: dict[str, Any] = {"device": "cuda", "page_size": 16, "max_running_requests": 8}
    settings |= {"mamba_track_interval": INTERVAL, "max_mamba_cache_size": 72}
    settings |= {"overlap_depth": overlap_depth, "disable_cuda_graph": not graph}
    with toy(**settings) as llm:
        for _ in range(2):  # cold, warm
            hold(llm, PROMPTS, GREEDY, TEXTS, MATCHES)
        hold(llm, PROMPTS, GREEDY, TEXTS, MATCHES, preempts=True)
        hold_two_turns(llm, GREEDY, TEXTS, MATCHES)
        llm.engine.check()


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_in_bfloat16_on_a_gpu(graph: bool) -> None:
    """Texts may part at near ties; acceptance may not change much, with hits or without."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_running_requests": 8}
    with toy(**settings, disable_cuda_graph=not graph) as llm:
        for _ in range(2):
            how = [params(GREEDY, i) for i in range(len(PROMPTS))]
            outs = llm.generate(input_ids=PROMPTS, sampling_params=how)
            lengths = [n for out in outs for n in out.meta_info["spec_accept_lengths"]]
            assert sum(lengths) / len(lengths) >= 2.4
        llm.engine.check()
        passed(llm, __file__)
