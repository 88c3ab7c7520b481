"""Compares algorithms, plain decoding included, at batch size 1 on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forerun import LLM
from forerun.engine.engine import Engine
from forerun.evals.acceptance import Acceptance
from forerun.evals.prompts import Prompt
from forerun.evals.timing import flush_caches, interleaved, median
from forerun.scheduler.adaptive_width import FixedWidth
from forerun_bench.one_batch import Trace, trace
from forerun_bench.widths import policy

FULL, ADAPTIVE = "full", "adaptive"
Key = tuple[str, str]  # algorithm, FULL or ADAPTIVE


@dataclass(frozen=True)
class Row:
    """One algorithm. Speed-ups relative to plain decoding: whole requests, medians over prompts."""

    algorithm: str
    accept_lengths: dict[str, float | None] = field(default_factory=dict)  # by skill, full width
    step_seconds: float | None = None  # of the full width
    speedup: float | None = None  # of the full width in every step
    adaptive_speedup: float | None = None
    identical: bool | None = None  # the tokens of plain decoding, with either policy, in every run
    reason: str | None = None  # why it could not start

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def compare_algorithms(
    plain: LLM,
    engines: Mapping[str, LLM],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    repetitions: int = 3,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Runs every prompt on every engine, interleaved, with empty prefix caches.

    `engines` must have adaptive width. The first row is plain decoding.
    """
    runs: dict[Key, Callable[[Prompt], Trace]] = {
        ("", FULL): lambda prompt: _run(plain.engine, prompt, max_new_tokens)
    }
    for name, llm in engines.items():
        runs[name, FULL] = partial(_at_full_width, llm.engine, max_new_tokens=max_new_tokens)
        runs[name, ADAPTIVE] = partial(_run, llm.engine, max_new_tokens=max_new_tokens)
    for run in runs.values():
        run(prompts[0])

    flush = partial(flush_caches, plain, *engines.values())
    results = []
    for prompt in prompts:
        keyed = {key: partial(run, prompt) for key, run in runs.items()}
        timed = _interleaved(keyed, repetitions, flush)
        results.append(timed)
        on_prompt()
    rows = [_row("", "NONE", prompts, results)]
    return rows + [_row(name, name, prompts, results) for name in engines]


def _interleaved(
    runs: Mapping[Key, Callable[[], Trace]], repetitions: int, flush: Callable[[], None]
) -> dict[Key, list[Trace]]:
    named = {"/".join(key): run for key, run in runs.items()}
    timed = interleaved(named, repetitions, before=flush)
    return {key: [t.value for t in timed["/".join(key)]] for key in runs}


def _run(engine: Engine, prompt: Prompt, max_new_tokens: int) -> Trace:
    return trace(engine, [prompt.ids], max_new_tokens, ignore_eos=False)


def _at_full_width(engine: Engine, prompt: Prompt, max_new_tokens: int) -> Trace:
    with policy(engine, FixedWidth(engine.scheduler.widths.widths)):
        return _run(engine, prompt, max_new_tokens)


def _row(
    key: str, name: str, prompts: Sequence[Prompt], results: Sequence[dict[Key, list[Trace]]]
) -> Row:
    plain, full, adaptive = ("", FULL), (key, FULL), (key, ADAPTIVE)
    texts = [
        {t.output_ids for k in (plain, full, adaptive) for t in result.get(k, ())}
        for result in results
    ]
    skills = list(dict.fromkeys(p.skill for p in prompts))
    lengths = {
        skill: Acceptance.total(
            result[full][0].acceptance
            for prompt, result in zip(prompts, results, strict=True)
            if prompt.skill == skill
        ).accept_length
        for skill in skills
    }

    steps = [s for result in results for run in result[full] for s in run.step_seconds]

    def speedup(way: Key) -> float | None:
        if way not in results[0]:
            return None
        return median([_seconds(r[plain]) / _seconds(r[way]) for r in results])

    return Row(
        algorithm=name,
        accept_lengths=lengths,
        step_seconds=median(steps) if steps else None,
        speedup=speedup(full),
        adaptive_speedup=speedup(adaptive),
        identical=all(len(same) == 1 for same in texts),
    )


def _seconds(traces: Sequence[Trace]) -> float:
    return median([t.steps[-1][0] for t in traces])
