"""A rank is a process of its own: plans and results cross as bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config.engine_config import EngineConfig
from forerun.core import codec
from forerun.core.errors import ConfigError, ExecutorError
from forerun.core.logprobs import LogprobParams, TokenLogprobs
from forerun.core.plan import (
    Admission,
    ConfidenceCounts,
    DecodeRequest,
    DeferredCount,
    Failure,
    PageWrite,
    PrefillChunk,
    SlotLogprobs,
    SlotSampling,
    StepPlan,
    StepResult,
)
from forerun.core.request import State
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun.executor.ranks.executor import RanksExecutor
from forerun.executor.ranks.messages import CLOSE, PLAN
from forerun.executor.ranks.rank import _run_plans
from forerun.speculative.registry import all_options
from tests.golden_engine import CASES, GOLDEN, golden_llm

PROMPTS = [case["prompt"] for case in CASES[:4]]
PARAMS = [
    {"temperature": 0.0, "max_new_tokens": 24},
    {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 3, "max_new_tokens": 24},
    {"temperature": 0.7, "sampling_seed": 4, "max_new_tokens": 20, "min_new_tokens": 6},
    {"temperature": 0.0, "max_new_tokens": 9, "repetition_penalty": 1.3, "logit_bias": {32: 1.0}},
]
Answer = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]


def config(algorithm: str | None, **settings: Any) -> EngineConfig:
    draft = {"speculative_draft_model_path": str(GOLDEN / "draft")} if algorithm == "DFLASH" else {}
    common = {"dtype": "float32", "skip_tokenizer_init": True, "max_running_requests": 3}
    named = {} if algorithm is None else {"speculative_algorithm": algorithm}
    options = {option.name: option.default for option in all_options()}
    return EngineConfig.of({**common, **draft, **named, **settings}, options)


@contextmanager
def remote_engine(settings: EngineConfig, overlap_depth: int) -> Iterator[Engine]:
    executor = RanksExecutor.start(settings, GOLDEN / "target", overlap_depth)
    try:
        yield Engine(settings, executor)
    finally:
        executor.close()


def answers(engine: Engine) -> list[Answer]:
    """Tokens and log-probabilities."""
    asked = [LogprobParams(start_len=0, top=2), None, LogprobParams(token_ids=(5,)), None]
    requests = [
        engine.make_request(list(prompt), SamplingParams.of(params), logprobs=logprobs)
        for prompt, params, logprobs in zip(PROMPTS, PARAMS, asked, strict=True)
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    engine.check()
    return [(r.output, r.output_logprobs, r.prompt_logprobs) for r in requests]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("algorithm", "overlap_depth"), [("DFLASH", 1), (None, 1), ("NGRAM", 0)], ids=str
)
def test_output_equals_an_executor_in_this_process(
    algorithm: str | None, overlap_depth: int
) -> None:
    settings = {"page_size": 16, "chunked_prefill_size": 20, "max_total_tokens": 512}
    settings["speculative_adaptive"] = False  # log-probabilities round differently by width
    with remote_engine(config(algorithm, **settings), overlap_depth) as engine:
        remote = answers(engine), answers(engine)  # the second time with prefix hits
        assert engine.info.limits.overlap_depth == overlap_depth
        if algorithm is not None:
            assert engine.stats()["spec_decode_num_accepted_tokens"] > 0
    with golden_llm(
        algorithm, overlap_depth=overlap_depth, max_running_requests=3, **settings
    ) as llm:
        local = answers(llm.engine), answers(llm.engine)
    assert remote == local


@pytest.mark.exhaustive
def test_invalid_settings_raise_in_the_parent() -> None:
    with pytest.raises(ConfigError, match="context_length 99999 is over the model's"):
        RanksExecutor.start(config(None, context_length=99999), GOLDEN / "target")


@pytest.mark.exhaustive
def test_a_killed_process_aborts_its_requests() -> None:
    with remote_engine(config(None), 1) as engine:
        request = engine.make_request(list(PROMPTS[0]), SamplingParams(temperature=0.0))
        engine.submit(request)
        engine.step()
        assert isinstance(engine.executor, RanksExecutor)
        engine.executor.local.ranks[0].process.kill()
        with pytest.raises(ExecutorError, match=r"ended unexpectedly \(exit code -9\)"):
            while engine.has_work:
                engine.step()
        assert request.state is State.FINISHED
        assert request.finish is not None and request.finish.type == "abort"
        engine.check()  # no page and no slot is lost


class Looks:
    """A step of a device that ends after so many looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def is_done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def result(self) -> StepResult:
        return StepResult([], [])


def test_a_step_that_ended_while_the_next_was_launched_is_late() -> None:
    """The first one ends during the second one's launch; the third one, alone, during its own."""
    plan, messages = PLAN + codec.encode(StepPlan()), deque[bytes | None]()
    messages.extend([plan, plan, None, plan, CLOSE])
    steps = iter([Looks(1), Looks(1), Looks(0)])
    plans, executor, sent = Mock(), Mock(), list[bytes]()
    plans.take = plans.receive = messages.popleft
    executor.info.limits.overlap_depth = 1
    executor.launch = lambda plan: next(steps)
    _run_plans(plans, executor, sent.append)
    found = [codec.decode_result(message[1:]).late for message in sent]
    assert found == [True, False, False]


ints = st.integers(0, 2**31)
tokens = st.lists(ints, max_size=5)
sampling = st.builds(
    SlotSampling,
    temperature=st.floats(0, 5),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=st.floats(0.1, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_ids=tokens.map(tuple),
    min_position=ints,
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    logit_bias=st.lists(st.tuples(ints, st.floats(-100, 100)), max_size=2).map(tuple),
)
logprobs = st.builds(
    SlotLogprobs,
    st.builds(LogprobParams, st.integers(-1, 9), st.integers(0, 20), tokens.map(tuple)),
    ints,
    ints,
)
entries = st.builds(
    TokenLogprobs,
    st.floats(allow_nan=False),
    st.lists(st.tuples(st.floats(allow_nan=False), ints), max_size=2).map(tuple),
    st.lists(st.floats(allow_nan=False), max_size=2).map(tuple),
)
page_writes = st.lists(st.builds(PageWrite, ints, ints, tokens.map(tuple)), max_size=3)
plans = st.builds(
    StepPlan,
    admitted=st.lists(
        st.builds(
            Admission,
            ints,
            st.text(),
            tokens.map(tuple),
            ints,
            ints,
            sampling,
            ints,
            st.none() | logprobs,
        ),
        max_size=3,
    ),
    page_writes=page_writes,
    window_writes=page_writes,
    deferred=st.lists(st.builds(DeferredCount, ints, ints), max_size=3),
    decode=st.lists(st.builds(DecodeRequest, ints, ints), max_size=3),
    num_verify_tokens=st.integers(1, 64),
    prefill=st.lists(st.builds(PrefillChunk, ints, ints, ints, st.booleans()), max_size=3),
)
counts = st.lists(st.lists(st.floats(0, 1e9), min_size=3, max_size=3), max_size=2)
results = st.builds(
    StepResult,
    decode=st.lists(tokens, max_size=3),
    survivals=st.lists(st.lists(st.floats(0, 1), max_size=3), max_size=3),
    prefill=st.lists(st.none() | ints, max_size=3),
    seconds=st.floats(0, 10),
    error=st.none() | st.text(),
    failed=st.lists(st.builds(Failure, ints, st.text()), max_size=2).map(tuple),
    held=st.lists(ints, max_size=2).map(tuple),
    phase_times=st.none() | st.tuples(ints, ints, ints, ints),
    decode_logprobs=st.lists(st.lists(entries, max_size=2), max_size=2),
    prefill_logprobs=st.lists(st.lists(entries, max_size=2), max_size=2),
    confidences=st.none() | st.builds(ConfidenceCounts, counts, counts, counts),
    late=st.booleans(),
)


@given(plans)
def test_plans_round_trip(plan: StepPlan) -> None:
    assert codec.decode_plan(codec.encode(plan)) == plan


@settings(deadline=None)  # the first call makes the decoder
@given(results)
def test_results_round_trip(result: StepResult) -> None:
    assert codec.decode_result(codec.encode(result)) == result
