"""Runs of an engine that several test files share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from forerun import LLM
from forerun.core.request import Request
from forerun.engine.engine import Engine


def run_together(engine: Engine, requests: Sequence[Request], preempts: bool = False) -> None:
    """All in one batch.

    `preempts`: every third step preempts the youngest, as if the pages had run out. Steps then
    decode beside prompts: a prompt of many steps that went first would begin again and again.
    """
    if preempts:
        engine.scheduler.limit_mixed_steps(0)
    for request in requests:
        engine.submit(request)
    for step in itertools.count():
        if not engine.has_work:
            break
        if preempts and step % 3 == 2 and len(engine.scheduler.running) > 1:
            engine.scheduler._preempt(engine.scheduler.running[-1])
        engine.step()
    for request in requests:
        engine.close_request(request)
    assert not preempts or any(request.preemptions for request in requests)


def hold_prompt_logprobs(llm: LLM, prompt: list[int], starts: Sequence[int]) -> None:
    """The same values from each `logprob_start_len` on, with what a cached prefix may hold."""
    values, cached = [], []
    for start in starts:
        out = llm.generate(
            input_ids=prompt, sampling_params={"temperature": 0.0, "max_new_tokens": 8},
            return_logprob=True, logprob_start_len=start,
        )  # fmt: skip
        cached.append(out.meta_info["cached_tokens"])
        assert cached[-1] <= start
        entries = out.meta_info["input_token_logprobs"]
        assert len(entries) == len(prompt) - start
        values.append([each[0] for each in entries[-9:]] + out.output_ids)
    llm.engine.check()
    assert max(cached) >= 32
    if llm.explain()["deterministic_inference"]:
        assert all(each == values[0] for each in values)
    for each in values:
        assert each == pytest.approx(values[0], abs=1e-4)
