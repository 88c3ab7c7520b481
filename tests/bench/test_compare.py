"""Comparison and what the demo prints of it, with fake engines."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from forerun.cli.demo_view import Show, lanes, summary
from forerun.core.sampling_params import SamplingParams
from forerun.evals.compare import Comparison, PromptResult, compare
from forerun.evals.prompts import Prompt
from forerun.llm.output import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
PROMPTS = [Prompt("one", "python", "def f", (1, 2)), Prompt("two", "word-problems", "Why?", (3,))]


def output(ids: list[int], accept_lengths: list[int]) -> RequestOutput:
    accepted = [length - 1 for length in accept_lengths]
    return RequestOutput(
        text=decode(ids),
        output_ids=ids,
        finish_reason={"type": "length"},
        meta_info={
            "completion_tokens": len(ids),
            "spec_verify_ct": len(accepted),
            "spec_num_proposed_drafts": 3 * len(accepted),
            "spec_num_correct_drafts": sum(accepted),
            "spec_correct_drafts_histogram": [
                accepted.count(n) for n in range(max(accepted, default=-1) + 1)
            ],
            "spec_accept_lengths": accept_lengths,
        },
        prompt_token_ids=[],
    )


def decode(ids: Any) -> str:
    return " ".join(f"t{i}" for i in ids)


class Pretender:
    """Stands in for an `LLM`: gives prepared outputs and counts what is asked of it."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self.outputs = outputs
        self.engine = self
        self.generated = 0
        self.flushed = 0

    def generate(self, *, input_ids: list[int], sampling_params: SamplingParams) -> RequestOutput:
        self.generated += 1
        return self.outputs[self.generated % len(self.outputs)]

    def flush_cache(self) -> None:
        self.flushed += 1


def test_every_prompt_runs_both_ways_in_turn() -> None:
    plain, spec = Pretender([output([5, 6, 7], [1, 1])]), Pretender([output([5, 6, 7], [2])])
    seen: list[PromptResult] = []
    result = compare(plain, spec, PROMPTS, GREEDY, 3, on_prompt=seen.append)  # type: ignore[arg-type]
    assert tuple(seen) == result.prompts
    assert result.identical
    assert plain.generated == spec.generated == 1 + 2 * 3  # a warm-up, prompts x repetitions
    assert plain.flushed == spec.flushed == 2 * 3 * 2  # before every timed run


def test_one_repetition_that_differs_is_not_identical() -> None:
    flaky = Pretender([output([5, 6, 7], [2]), output([5, 6, 8], [2])])
    plain = Pretender([output([5, 6, 7], [1, 1])])
    assert not compare(plain, flaky, PROMPTS[:1], GREEDY, 3).identical  # type: ignore[arg-type]


def result(plain_seconds: float, spec_seconds: float, identical: bool = True) -> PromptResult:
    return PromptResult(
        prompt=PROMPTS[0],
        plain=output([1, 2, 3, 4, 5], [1, 1, 1, 1]),
        spec=output([1, 2, 3, 4, 5], [3, 1]),
        plain_seconds=plain_seconds,
        spec_seconds=spec_seconds,
        identical=identical,
    )


COMPARISON = Comparison((result(1.0, 0.5), result(1.0, 0.25), result(2.0, 0.2)))


def test_figures_are_medians_and_sums() -> None:
    assert COMPARISON.speedup == pytest.approx(4.0)  # of 2, 4, 10
    assert COMPARISON.plain_tok_s == pytest.approx(5.0)
    assert COMPARISON.spec_tok_s == pytest.approx(20.0)
    assert COMPARISON.acceptance.accept_length == 15 / 6
    assert COMPARISON.acceptance.histogram == (3, 0, 3)


def test_json_has_what_scripts_read() -> None:
    out = json.loads(json.dumps(COMPARISON.as_dict()))
    overall = {"identical", "speedup", "accept_length", "plain_tok_s", "spec_tok_s", "histogram"}
    assert overall <= set(out)
    assert overall <= set(out["prompts"][0])
    assert len(out["prompts"]) == 3
    assert out["identical"] is True


def shown(width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    show = Show(console, "SOME", decode, live=False)
    show.opening()
    for prompt in COMPARISON.prompts:
        show.prompt(prompt)
    show.closing(COMPARISON)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_pipe_gets_text_without_escapes(width: int) -> None:
    text = shown(width)
    assert "\x1b" not in text
    assert all(len(line) <= width for line in text.splitlines())
    lines = text.splitlines()
    assert "identical: yes" in lines
    assert lines[-1] == "speed-up: 4.00 (median over 3 prompts)"


def test_wide_screens_show_both_side_by_side() -> None:
    both = [line for line in shown(120).splitlines() if "plain: 5 tok/s" in line]
    assert both and all("SOME: " in line for line in both[:2])
    assert not any("plain: " in line and "SOME: " in line for line in shown(80).splitlines())


def test_a_terminal_gets_colour() -> None:
    assert "\x1b[1;32m" in shown(120, force_terminal=True, color_system="standard")


def test_lanes_fill_up_in_their_measured_time() -> None:
    plain, spec = lanes(result(1.0, 0.5), "SOME", decode)
    console = Console(file=io.StringIO(), width=80)

    def words(panel: Any) -> int:
        return len(str(panel.renderable).replace("⟦", "").replace("⟧", "").split())

    assert words(plain.at(0.0, console)) == 0
    assert words(plain.at(0.45, console)) == 2
    assert words(plain.at(1.0, console)) == words(spec.at(0.5, console)) == 5
    assert words(spec.at(9.0, console)) == 5


def test_a_difference_is_shown() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(summary(Comparison((result(1.0, 0.5), result(1.0, 1.0, False))), "SOME", console))
    assert isinstance(console.file, io.StringIO)
    assert "identical: no" in console.file.getvalue().splitlines()
