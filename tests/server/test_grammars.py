"""Structured output over HTTP: equal to `LLM`, and invalid grammars refused before they run."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import openai
import pytest

from forerun import LLM
from tests.covering import some_of
from tests.server.support import LONG, PROMPT, QUESTION, LiveServer

pytest.importorskip("xgrammar")

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["number", "text"]},
        "value": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["kind", "value"],
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "description": "x", "strict": True, "schema": SCHEMA},
}
CONTENT = {"type": "regex", "pattern": "[a-z]{3}"}
TAG = {"format": {"type": "tag", "begin": "<t>", "content": CONTENT, "end": "</t>"}}
# (parameters of the OpenAI API, the same of `SamplingParams`)
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": FORMAT}, {"json_schema": SCHEMA}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "text"}}, {}),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structural_tag": {"type": "structural_tag", **TAG}},
    ),
    ({"extra_body": {"regex": "[a-f]{4,9}"}}, {"regex": "[a-f]{4,9}"}),
    (
        {"extra_body": {"ebnf": 'root ::= "a" root | "b"'}, "frequency_penalty": 1.5},
        {"ebnf": 'root ::= "a" root | "b"', "frequency_penalty": 1.5},
    ),
]


@pytest.mark.parametrize(("given", "params"), some_of(CASES, 0, 3, 4), ids=range(len(CASES)))
def test_grammars_equal_the_engine(
    server: LiveServer, llm: LLM, given: dict[str, Any], params: dict[str, Any]
) -> None:
    params = {**params, "sampling_seed": 6, "max_new_tokens": 40}
    extra = {**given, **given.get("extra_body", {})}
    extra.pop("extra_body", None)
    call: dict[str, Any] = {"model": "bundled", "seed": 6, "max_tokens": 40}
    scored = {**call, "prompt": PROMPT, "logprobs": 0, "extra_body": extra}
    want = llm.generate(PROMPT, params, return_logprob=True)
    client = server.client()
    got = client.completions.create(**scored).choices[0]
    assert (got.text, got.finish_reason) == (want.text, want.finish_reason["type"])
    entries = want.meta_info["output_token_logprobs"]
    assert got.logprobs.token_logprobs == [value for value, _, _ in entries]
    chunks = client.completions.create(**scored, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == want.text
    if params.get("json_schema") and want.finish_reason["type"] == "stop":
        assert set(json.loads(got.text)) == {"kind", "value"}
    native = server.generate(text=PROMPT, sampling_params=params)
    assert native["text"] == want.text

    want = llm.chat(MESSAGES, params)
    chat = client.chat.completions.create(messages=MESSAGES, **call, **given).choices[0]
    assert chat.message.content == want.text


def test_strict_schemas_through_the_client_validate(server: LiveServer) -> None:
    for seed in range(2):
        got = server.client().chat.completions.create(
            model="bundled",
            messages=MESSAGES,
            seed=seed,
            max_tokens=200,
            response_format=FORMAT,
        )
        choice = got.choices[0]
        assert choice.finish_reason == "stop"
        answer = json.loads(choice.message.content)
        assert answer["kind"] in ("number", "text")
        assert isinstance(answer["value"], int)


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type must be", "response_format"),
    ({"response_format": {}}, "response_format.type must be", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "a name and a schema", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"scheme": 1, "schema": {}}}},
        "Did you mean 'schema'",
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "not cannot be enforced",
        None,
    ),
    ({"regex": "(a"}, "regex is invalid", None),
    ({"ebnf": "root ::="}, "ebnf is invalid", None),
    ({"json_schema": "{"}, "not valid JSON", "json_schema"),
    ({"regex": "a" * 200_000}, "at most 131072", "regex"),
    ({"regex": "a", "ebnf": "b"}, "one grammar only", None),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "one grammar only", None),
]


@pytest.mark.parametrize(("extra", "words", "param"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_grammars_are_refused(
    server: LiveServer, extra: dict[str, Any], words: str, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(
            model="bundled", messages=MESSAGES, extra_body={**extra, "stream": True}
        )
    assert words in caught.value.message
    assert caught.value.param == param


@pytest.mark.exhaustive
def test_running_requests_go_on_while_a_grammar_is_compiled(server: LiveServer) -> None:
    """A schema that takes long is compiled beside a stream of text."""
    words = {f"p{i}": {"type": "string", "pattern": f"[a-z]{{1,{i + 5}}}"} for i in range(20)}
    slow = {"json_schema": {"type": "object", "properties": words}, "max_new_tokens": 1}
    body = {"text": PROMPT, "sampling_params": LONG, "stream": True}

    def compile_it() -> float:
        started = time.monotonic()
        server.generate(text="x", sampling_params=slow)
        return time.monotonic() - started

    times = []
    with ThreadPoolExecutor() as pool, server.http.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        compiled = pool.submit(compile_it)
        while not compiled.done():
            next(lines)
            times.append(time.monotonic())
    assert max(after - before for before, after in pairwise(times)) < compiled.result() / 2
    server.wait_idle()
