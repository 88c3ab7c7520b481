"""Recorded steps on a CPU give what eager steps give, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from forerun import LLM
from forerun.core.errors import AlgorithmError
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.graphs import cpu as cpu_graphs
from forerun.executor.graphs.cpu import CpuGraphSteps
from forerun.executor.graphs.steps import DecodeBatch, EagerSteps
from forerun.executor.step.clock import StepClock
from forerun.kernels.cpu import library

pytestmark = [
    pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("with_cpu_kernels"),
]

PROMPTS = ["A box holds 6 pens. Tom has 3 boxes.", "def add(a, b):", "for i in range("]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "sampling_seed": 5}
PENALIZED: dict[str, Any] = {**GREEDY, "frequency_penalty": 0.6}


def texts(**settings: Any) -> tuple[list[list[int]], LLM]:
    """Alone, then all together; greedy, sampled, and with penalties, which run eagerly."""
    with LLM(dtype="float32", **settings) as llm:
        outs = [llm.generate(PROMPTS[0], GREEDY)]
        outs += llm.generate(PROMPTS, [GREEDY, SEEDED, PENALIZED])
        llm.engine.check()
        return [out.output_ids for out in outs], llm


@pytest.mark.parametrize(
    "algorithm",
    [
        None,
        *(
            pytest.param(n, marks=pytest.mark.exhaustive)
            for n in ("DFLASH", "NGRAM", "DDTREE", "SUFFIX", "DFLASH,SUFFIX", "EAGLE3,SUFFIX")
        ),
    ],
)
def test_text_is_that_of_eager_steps(algorithm: str | None) -> None:
    eager, llm = texts(speculative_algorithm=algorithm, disable_cuda_graph=True)
    assert isinstance(llm.engine.executor.steps, EagerSteps)  # type: ignore[attr-defined]
    recorded, llm = texts(speculative_algorithm=algorithm)
    steps = llm.engine.executor.steps  # type: ignore[attr-defined]
    assert isinstance(steps, CpuGraphSteps) and any(steps.recorded.values())
    assert recorded == eager


@pytest.mark.exhaustive
def test_text_of_beam_trees_is_that_of_eager_steps() -> None:
    tree: dict[str, Any] = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 3}
    eager, _ = texts(**tree, disable_cuda_graph=True)
    recorded, llm = texts(**tree)
    assert any(llm.engine.executor.steps.recorded.values())  # type: ignore[attr-defined]
    assert recorded == eager


def test_a_plain_greedy_step_is_a_few_calls() -> None:
    _, llm = texts()
    steps = llm.engine.executor.steps  # type: ignore[attr-defined]
    greedy = [
        kept.graph.num_parts
        for key, kept in steps.recorded.items()
        if kept is not None and not key.shape.flags.sampled
    ]
    assert greedy and max(greedy) <= 8


@pytest.mark.exhaustive
def test_old_steps_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_graphs, "MAX_BYTES", 1)
    got, llm = texts()
    assert len(llm.engine.executor.steps.recorded) == 1  # type: ignore[attr-defined]
    monkeypatch.undo()
    assert got == texts()[0]


@pytest.mark.exhaustive
def test_text_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    got = []
    for threads in (1, 2):
        monkeypatch.setattr(
            "forerun.platform.cpu_threads.torch.get_num_threads", lambda n=threads: n
        )
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        got.append(texts(speculative_algorithm="DFLASH")[0])
    assert got[0] == got[1]


def drafts_after_plain_steps(**settings: Any) -> tuple[list[int], LLM]:
    """Accept lengths of a conversation whose first answer is decoded without drafts."""
    own = {"speculative_algorithm": "DFLASH", "speculative_adaptive": False, "dtype": "float32"}
    with LLM(**own, **settings) as llm:
        first = llm.generate(PROMPTS[0], {**GREEDY, "max_new_tokens": 40, "speculative": False})
        ids = [*llm.tokenizer.encode(PROMPTS[0]), *first.output_ids]
        second = llm.generate(input_ids=ids, sampling_params=GREEDY)
        return second.meta_info["spec_accept_lengths"], llm


@pytest.mark.exhaustive
def test_deferred_observes_are_recorded() -> None:
    """The second prompt is a prefix hit: the draft's K/V of it are those of deferred observes."""
    want, _ = drafts_after_plain_steps(disable_cuda_graph=True)
    got, llm = drafts_after_plain_steps()
    assert any(llm.engine.executor.steps.observes.values())  # type: ignore[attr-defined]
    assert got == want and max(got) > 1


def test_an_error_of_the_step_is_not_lost_while_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"speculative_algorithm": "DFLASH", "speculative_adaptive": False}
    with LLM(**own, speculative_fallback=True) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        errors = [AlgorithmError("before its drafts")]

        def check(batch: DecodeBatch, clock: StepClock) -> None:
            if batch.num_verify_tokens > 1 and errors:
                executor.step.algorithm.put_back(errors.pop())

        monkeypatch.setattr(executor, "_check_row_layout", check)
        llm.generate(PROMPTS[0], GREEDY)
        assert not errors
        assert llm.stats()["algorithm_failures"] == 1
