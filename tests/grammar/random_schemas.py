"""Random JSON schemas, and whether outputs under them parse and validate.

`python -m tests.grammar.random_schemas --requests 10000 --speculative-algorithm DFLASH` runs the
bundled pair over random schemas, each with settings of its own, until that many outputs have ended.
Those that `max_new_tokens` cuts off must be what a valid output begins with.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import jsonschema

from forerun import LLM, RequestOutput
from forerun.core.sampling_params import SamplingParams
from tests.grammar.vocab import compiler

WORDS = ("name", "age", "ok", "list", "value", "é", "two words", "x_1")
PATTERNS = ("^[ab]{1,5}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no)$", "^\\w{2,6}$")
LONG: list[dict[str, Any]] = [  # most outputs are cut off, some end
    {"minLength": 1, "maxLength": 1000},
    {"maxLength": 300},
    {"minLength": 2, "maxLength": 130},
    {"minLength": 140},
    {"pattern": "^[\\w \\u0800-\\uffff]{1,200}$"},
]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"min_new_tokens": 9},
    {"ignore_eos": True},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.2},
    {"max_draft_tokens": 2},
]
MAX_NEW_TOKENS = 160
BATCH = 64


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """With small bounds, so that most outputs end."""
    kinds = [text, integer, number, constant, choice]
    kinds += [array, record, union] if depth else []
    made = rng.choice(kinds)(rng, depth)
    if rng.random() < 0.2:
        made["description"] = 'free "text"'
    return made


def text(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if rng.random() < 0.2:
        return {"type": "string", **rng.choice(LONG)}
    low = rng.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 2000)}
    return {"type": "integer", **(bounds if rng.random() < 0.7 else {})}


def number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["number", "boolean", "null"])}


def constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([*WORDS, 0, -1.5, True, None, [1, "a"], {"k": []}])}


def choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, 2.5, None, False, [], {}], rng.randint(1, 5))}


def array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    bounds = {"minItems": low, "maxItems": low + rng.randint(0, 2)}
    return {"type": "array", "items": schema(rng, depth - 1), **bounds}


def record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def params(rng: random.Random) -> dict[str, Any]:
    """One request's parameters."""
    sampling = rng.choice([{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.5}])
    extra = rng.choice(EXTRAS)
    return {
        "json_schema": schema(rng),
        "sampling_seed": rng.getrandbits(32),
        "max_new_tokens": MAX_NEW_TOKENS,
        **sampling,
        **extra,
    }


def check(output: RequestOutput, asked: dict[str, Any]) -> bool:
    """Whether it ended by itself; then it parses and validates, with nothing around it."""
    reason = output.meta_info["finish_reason"]["type"]
    return check_text(output.text, output.output_ids, reason, asked)


def check_text(text: str, ids: Sequence[int], reason: str, asked: dict[str, Any]) -> bool:
    """As `check`; `ids`: of an output that was cut off, if they are known."""
    if reason == "length":
        assert begins_a_match(text, ids, asked["json_schema"]), (text, asked)
        return False
    assert reason == "stop", (reason, asked)
    assert text == text.strip(), (text, asked)
    jsonschema.validate(json.loads(text), asked["json_schema"])
    return True


def begins_a_match(text: str, ids: Sequence[int], asked: dict[str, Any]) -> bool:
    """Whether an output that follows the schema begins with these tokens, or with this text."""
    import xgrammar

    grammar = SamplingParams(json_schema=json.dumps(asked)).grammar
    assert grammar is not None
    matcher = xgrammar.GrammarMatcher(compiler().compile(grammar))
    if not ids:  # the last character may be incomplete
        return bool(matcher.accept_string(text.rstrip("\ufffd")))
    return all(matcher.accept_token(token) for token in ids)


def run(llm: LLM, seed: int, count: int) -> int:
    """Runs `count` requests in one batch; returns how many of them ended by themselves."""
    rng = random.Random(seed)
    asked = [params(rng) for _ in range(count)]
    prompts = [rng.choice(["JSON:\n", "Once upon a time", "def f(x):"]) for _ in asked]
    outputs = llm.generate(prompts, asked)
    return sum(map(check, outputs, asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--speculative-algorithm", default="DFLASH")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--any-whitespace", action="store_true")
    options = parser.parse_args()
    begin, done, ended = time.monotonic(), 0, 0
    with LLM(
        speculative_algorithm=options.speculative_algorithm,
        device=options.device,
        constrained_json_disable_any_whitespace=not options.any_whitespace,
    ) as llm:
        while ended < options.requests:
            ended += run(llm, done, BATCH)
            done += BATCH
            print(f"{done} requests, {ended} ended, {time.monotonic() - begin:.0f} s", flush=True)
        llm.engine.check()


if __name__ == "__main__":
    main()
