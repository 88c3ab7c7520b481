"""The evaluations of `forerun eval`: accuracy and acceptance.

All prompts are submitted at once, and the engine batches them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun import LLM, RequestOutput, SamplingParams
from forerun.evals.acceptance import Acceptance
from forerun.evals.prompts import WORDS, Prompt
from forerun.evals.word_problems import extract_answer

Progress = Callable[[], None]  # called when a prompt is done


@dataclass(frozen=True)
class EvalResult:
    """`correct` is None without reference answers, `identical` where it was not checked."""

    name: str
    examples: int
    correct: int | None
    identical: int | None
    tokens: int
    seconds: float
    acceptance: Acceptance

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else self.correct / self.examples

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "eval": self.name,
            "examples": self.examples,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "identical": self.identical,
            "output_tokens": self.tokens,
            "seconds": self.seconds,
            "tok_s": self.tok_s,
            **self.acceptance.as_dict(),
        }


def run_all(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, done: Progress = lambda: None
) -> list[RequestOutput]:
    """The outputs in the order of the prompts; all are submitted before the first step."""
    finished: dict[int, RequestOutput] = {}
    for output in llm.generate(
        input_ids=[p.ids for p in prompts], sampling_params=params, stream=True
    ):
        if output.finished:
            finished[output.prompt_index] = output
            done()
    return [finished[i] for i in range(len(prompts))]


def evaluate(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, done: Progress = lambda: None
) -> tuple[EvalResult, list[RequestOutput]]:
    """Runs the prompts of one skill and checks the answers of word problems."""
    begin = time.perf_counter()
    outputs = run_all(llm, prompts, params, done)
    seconds = time.perf_counter() - begin
    skill = prompts[0].skill
    right = [
        extract_answer(output.text) == prompt.answer
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    result = EvalResult(
        name=skill,
        examples=len(prompts),
        correct=sum(right) if skill == WORDS else None,
        identical=None,
        tokens=sum(len(o.output_ids) for o in outputs),
        seconds=seconds,
        acceptance=Acceptance.total(Acceptance.of(o.meta_info) for o in outputs),
    )
    return result, outputs


def check_identical(
    result: EvalResult,
    outputs: Sequence[RequestOutput],
    others: Sequence[RequestOutput],
) -> EvalResult:
    """`others`: by plain decoding. `identical` counts outputs equal token for token."""
    pairs = zip(outputs, others, strict=True)
    return replace(result, identical=sum(a.output_ids == b.output_ids for a, b in pairs))
