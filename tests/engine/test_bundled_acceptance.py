"""Acceptance rates of the bundled pair per draft position, to detect a draft that got worse."""

from __future__ import annotations

import pytest

from forerun import LLM, RequestOutput
from forerun.evals.acceptance import Acceptance
from forerun.evals.prompts import held_out
from forerun.evals.word_problems import extract_answer, problems

# Fractions of verify steps that accepted draft 1, 2, 3 ... (157 and 330 steps, float32, greedy).
WORDS = (0.975, 0.962, 0.936, 0.892, 0.885, 0.841, 0.803, 0.764)
PYTHON = (0.582, 0.355, 0.212, 0.106, 0.045)
TOLERANCE = 0.02  # another CPU may round a near tie differently in a few steps of some hundred


def acceptance_by_position(outputs: list[RequestOutput], positions: int) -> list[float]:
    counts = [Acceptance.of(out.meta_info).histogram for out in outputs]
    steps = sum(map(sum, counts))
    return [sum(sum(h[k:]) for h in counts) / steps for k in range(1, positions + 1)]


def close(got: list[float], pinned: tuple[float, ...]) -> bool:
    return all(abs(a - b) <= TOLERANCE for a, b in zip(got, pinned, strict=True))


@pytest.mark.exhaustive
def test_acceptance_and_answers_of_the_bundled_pair() -> None:
    asked = problems(24)
    chats = [[{"role": "user", "content": problem.question}] for problem in asked]
    with LLM(speculative_algorithm="DFLASH", dtype="float32", speculative_adaptive=False) as llm:
        words = llm.chat(chats, {"temperature": 0, "max_new_tokens": 160})
        texts = [row["prompt"] for row in held_out()[:12]]
        params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
        python = llm.generate(texts, params)
    right = sum(extract_answer(o.text) == p.answer for o, p in zip(words, asked, strict=True))
    assert right >= 23
    assert close(acceptance_by_position(words, len(WORDS)), WORDS)
    assert close(acceptance_by_position(python, len(PYTHON)), PYTHON)
