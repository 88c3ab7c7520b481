"""Plain decoding compared with speculation, prompt by prompt at batch size 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forerun import LLM, RequestOutput, SamplingParams
from forerun.evals.acceptance import Acceptance
from forerun.evals.prompts import Prompt
from forerun.evals.timing import flush_caches, interleaved, median

PLAIN, SPEC = "plain", "spec"


@dataclass(frozen=True)
class PromptResult:
    """One prompt. Seconds of a whole `generate`, median over the repetitions."""

    prompt: Prompt
    plain: RequestOutput
    spec: RequestOutput
    plain_seconds: float
    spec_seconds: float
    identical: bool  # token for token, in every repetition

    @property
    def tokens(self) -> int:
        return len(self.spec.output_ids)

    @property
    def plain_tok_s(self) -> float:
        return len(self.plain.output_ids) / self.plain_seconds

    @property
    def spec_tok_s(self) -> float:
        return self.tokens / self.spec_seconds

    @property
    def speedup(self) -> float:
        return self.spec_tok_s / self.plain_tok_s

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(self.spec.meta_info)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.prompt.name,
            "skill": self.prompt.skill,
            "identical": self.identical,
            "speedup": self.speedup,
            "accept_length": self.acceptance.accept_length,
            "plain_tok_s": self.plain_tok_s,
            "spec_tok_s": self.spec_tok_s,
            "tokens": self.tokens,
            "histogram": list(self.acceptance.histogram),
            "accept_lengths": list(self.spec.meta_info["spec_accept_lengths"]),
            "text": self.spec.text,
        }


@dataclass(frozen=True)
class Comparison:
    """All prompts. Speeds are medians over prompts; acceptance is over all verify steps."""

    prompts: tuple[PromptResult, ...]
    outputs: tuple[RequestOutput, ...] = ()  # of all runs, the first ones included

    @property
    def identical(self) -> bool:
        return all(p.identical for p in self.prompts)

    @property
    def speedup(self) -> float:
        return median([p.speedup for p in self.prompts])

    @property
    def plain_tok_s(self) -> float:
        return median([p.plain_tok_s for p in self.prompts])

    @property
    def spec_tok_s(self) -> float:
        return median([p.spec_tok_s for p in self.prompts])

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.total(p.acceptance for p in self.prompts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "speedup": self.speedup,
            "accept_length": self.acceptance.accept_length,
            "plain_tok_s": self.plain_tok_s,
            "spec_tok_s": self.spec_tok_s,
            "histogram": list(self.acceptance.histogram),
            "prompts": [p.as_dict() for p in self.prompts],
        }


def compare(
    plain: LLM,
    spec: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    repetitions: int = 3,
    on_prompt: Callable[[PromptResult], None] = lambda result: None,
) -> Comparison:
    """Runs every prompt on both engines, interleaved, with empty prefix caches.

    `params` must be greedy or have a seed; otherwise the texts differ.
    """
    outputs = [
        llm.generate(input_ids=list(prompts[0].ids), sampling_params=params)
        for llm in (plain, spec)
    ]
    results = []
    for prompt in prompts:
        result, runs = compare_prompt(plain, spec, prompt, params, repetitions)
        results.append(result)
        outputs += runs
        on_prompt(result)
    return Comparison(tuple(results), tuple(outputs))


def compare_prompt(
    plain: LLM, spec: LLM, prompt: Prompt, params: SamplingParams, repetitions: int
) -> tuple[PromptResult, list[RequestOutput]]:
    """The result, and the outputs of all repetitions."""

    def run(llm: LLM) -> Callable[[], RequestOutput]:
        return lambda: llm.generate(input_ids=list(prompt.ids), sampling_params=params)

    runs = {PLAIN: run(plain), SPEC: run(spec)}
    timed = interleaved(runs, repetitions, before=partial(flush_caches, plain, spec))
    outputs = {name: [t.value for t in runs] for name, runs in timed.items()}
    every = [*outputs[PLAIN], *outputs[SPEC]]
    result = PromptResult(
        prompt=prompt,
        plain=outputs[PLAIN][0],
        spec=outputs[SPEC][0],
        plain_seconds=median([t.seconds for t in timed[PLAIN]]),
        spec_seconds=median([t.seconds for t in timed[SPEC]]),
        identical=len({tuple(output.output_ids) for output in every}) == 1,
    )
    return result, every
