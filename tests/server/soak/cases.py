"""Requests with fixed seeds, and what plain decoding answers to them in this process."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from forerun import LLM

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["number", "text"]}, "value": {"type": "integer"}},
    "required": ["kind", "value"],
    "additionalProperties": False,
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMA, "logit_bias": {"224": -100}},
    {"regex": "[a-f]{4,30}"},
    {"ebnf": 'root ::= "a" root | "b"'},
    {"json_object": True, "logit_bias": {"224": -100}},
)
LENGTHS = (1, 3, 12, 40, 90, 150, 400)  # tokens of an answer
WIDTHS = (10, 80, 300, 1500, 5000)  # characters of a prompt


@dataclass(frozen=True)
class Case:
    """One request."""

    text: str  # of the prompt, or what the user says
    params: dict[str, Any]  # of `SamplingParams`
    chat: bool

    @property
    def n(self) -> int:
        return int(self.params.get("n", 1))


@dataclass(frozen=True)
class Sample:
    ids: list[int]
    text: str
    finish: str


@dataclass(frozen=True)
class Reference:
    """What the answer to a case must be."""

    prompt_ids: list[int]
    samples: list[Sample]


def make_cases(count: int, rng: random.Random) -> list[Case]:
    return [_case(rng) for _ in range(count)]


def _case(rng: random.Random) -> Case:
    chat = rng.random() < 0.4
    text = rng.choice(_questions()) if chat else _code(rng, rng.choice(WIDTHS))
    return Case(text, _params(rng), chat)


def _params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.6, 1.0, 1.3)),
        "sampling_seed": rng.randrange(2**40),
        "max_new_tokens": rng.choice(LENGTHS),
    }
    for chance, more in (
        (0.2, {"top_p": 0.8}),
        (0.2, {"top_k": 20}),
        (0.2, {"min_p": 0.05}),
        (0.25, {"frequency_penalty": 0.7}),
        (0.25, {"presence_penalty": -0.4}),
        (0.25, {"repetition_penalty": 1.2}),
        (0.15, {"logit_bias": {"100": 2.5, "224": -3.0}}),
        (0.2, {"stop": ["\n\n", "return", " the"]}),
        (0.2, {"ignore_eos": True}),
        (0.15, {"speculative": False}),
        (0.15, {"max_draft_tokens": 3}),
        (0.3, rng.choice(GRAMMARS)),
    ):
        if rng.random() < chance:
            params |= more
    if params["temperature"] > 0 and rng.random() < 0.2:
        params["n"] = rng.randint(2, 4)
    return params


def _lines(name: str) -> list[dict[str, Any]]:
    text = (files("forerun.evals") / "data" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _code(rng: random.Random, characters: int) -> str:
    pieces = [line["prompt"] for line in _lines("python_heldout.jsonl")]
    rng.shuffle(pieces)
    return "\n".join(pieces)[:characters]


def _questions() -> list[str]:
    return [line["question"] for line in _lines("word_problems.jsonl")]


def references(cases: list[Case], **engine: Any) -> list[Reference]:
    """Of all cases, by an engine without drafts.

    Args:
        engine: its settings.
    """
    found: dict[int, Reference] = {}
    with LLM(**engine) as llm:
        for chat in (False, True):
            numbers = [at for at, case in enumerate(cases) if case.chat is chat]
            params = [cases[at].params for at in numbers]
            if chat:
                asked = [[{"role": "user", "content": cases[at].text}] for at in numbers]
                outputs = iter(llm.chat(asked, params))
            else:
                outputs = iter(llm.generate([cases[at].text for at in numbers], params))
            for at in numbers:
                mine = [next(outputs) for _ in range(cases[at].n)]
                samples = [Sample(o.output_ids, o.text, o.finish_reason["type"]) for o in mine]
                found[at] = Reference(mine[0].prompt_token_ids, samples)
    return [found[at] for at in range(len(cases))]
