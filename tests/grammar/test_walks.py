"""Random walks through the grammars of random schemas: whatever ends must validate.

No model: the next token is any that the mask allows, so that walks go where models never would.
Every schema is either refused or exact.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from forerun.core.errors import RequestError
from forerun.core.sampling_params import SamplingParams

jsonschema = pytest.importorskip("jsonschema")
xgrammar = pytest.importorskip("xgrammar")

from tests.grammar.vocab import EOS, VOCAB_SIZE, new_compiler  # noqa: E402

NAMES = ("a", "b", "é", "x y", "n1")
VALUES = (*NAMES, 1, 2.5, None, True, [], {"a": 1}, "a\nb", '"q"', "\\", "\u2028")
PATTERNS = ("^a+$", "b", "^\\d{2}$", "^(a|b)*c$", "a|b$", "^[\\w.]+@x$", "^[a-c]{1,3}$")
TYPES = ("string", "integer", "number", "object", "array", "boolean", "null")
LIMIT = 100  # tokens of a walk


def schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.15 and depth:
        return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind < 0.25:
        typed = {"type": rng.choice(TYPES)} if rng.random() < 0.2 else {}
        return {"enum": rng.sample(VALUES, rng.randint(1, 3)), **typed}
    if kind < 0.3:
        return {"const": rng.choice(VALUES)}
    types = rng.sample(TYPES, 1 if rng.random() < 0.7 else 3)
    made: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
    for name, add in (("string", text), ("array", array), ("object", record)):
        if name in types:
            made |= add(rng, depth)
    if {"integer", "number"} & set(types):
        made |= bounds(rng)
    if rng.random() < 0.1:
        del made["type"]
    if rng.random() < 0.05:
        made[rng.choice(["uniqueItems", "not", "contains"])] = rng.choice([True, {}])
    return made


def some(rng: random.Random, **values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if rng.random() < 0.4}


def text(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    if rng.random() < 0.2:
        return some(rng, minLength=low, maxLength=low + rng.choice([126, 129, 160, 4000]))
    lengths = some(rng, minLength=low, maxLength=low + rng.randint(0, 4))
    return lengths if rng.random() < 0.6 else some(rng, pattern=rng.choice(PATTERNS), **lengths)


def bounds(rng: random.Random) -> dict[str, Any]:
    low = rng.choice([0, -5, 3, 10, -120])
    return some(
        rng,
        minimum=low,
        exclusiveMaximum=low + rng.choice([5, 100]),
        multipleOf=rng.choice([2, 3, 10]),
    )


def array(rng: random.Random, depth: int) -> dict[str, Any]:
    inner = schema(rng, depth - 1) if depth else {"type": "integer"}
    low = rng.randint(0, 2)
    return some(
        rng, items=inner, minItems=low, maxItems=low + rng.randint(0, 2), prefixItems=[inner]
    )


def record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 3))
    inner = {name: schema(rng, depth - 1) if depth else {"type": "null"} for name in names}
    return some(
        rng,
        properties=inner,
        required=rng.sample(names, rng.randint(0, len(names))),
        additionalProperties=rng.choice([True, False, {"type": "integer"}]),
        patternProperties={"^p": {"type": "null"}},
        propertyNames={"pattern": "^[a-c]+$"},
        minProperties=rng.randint(0, 2),
        maxProperties=rng.randint(1, 3),
    )


def walk(matcher: Any, rng: random.Random, spelled: list[bytes]) -> bytes | None:
    """The text at a random end; None: there was none within `LIMIT` tokens."""
    bitmask, out = torch.empty(1, VOCAB_SIZE // 32, dtype=torch.int32), b""
    for _ in range(LIMIT):
        matcher.fill_next_token_bitmask(bitmask)
        bits = bitmask[0].unsqueeze(1) >> torch.arange(32, dtype=torch.int32) & 1
        allowed = bits.flatten().nonzero().flatten().tolist()
        going_on = [token for token in allowed if token not in EOS]
        if len(going_on) < len(allowed) and (not going_on or rng.random() < 0.7):
            return out
        if not going_on:
            return None
        few = rng.sample(going_on, min(8, len(going_on)))
        token = rng.choice(few) if rng.random() < 0.4 else min(few, key=lambda t: len(spelled[t]))
        assert matcher.accept_token(token)
        out += spelled[token]
    return None


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [100, 3000], ids=["some", "many"])
def test_ends_validate(count: int) -> None:
    by = new_compiler(any_whitespace=False)
    spelled = [bytes(token) for token in by.vocabulary().tokenizer_info().decoded_vocab]
    ended = refused = 0
    for seed in range(count):
        rng = random.Random(seed)
        asked = schema(rng, 2)
        grammar = SamplingParams(json_schema=json.dumps(asked)).grammar
        assert grammar is not None
        try:
            compiled = by.compile(grammar)
        except RequestError:
            refused += 1
            continue
        for _ in range(2):
            out = walk(xgrammar.GrammarMatcher(compiled), rng, spelled)
            if out is None:
                continue
            ended += 1
            value = json.loads(out.decode(errors="replace"))  # single bytes may spell a surrogate
            assert out == out.strip()
            jsonschema.Draft202012Validator(asked).validate(value)
    assert ended > 0.8 * count and refused < 0.6 * count, (ended, refused)
