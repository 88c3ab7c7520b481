"""Penalties, biases and log-probabilities over HTTP: equal to `LLM`, in the shapes of each API."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest

from forerun import LLM
from tests.covering import some_of
from tests.server.support import PROMPT, QUESTION, LiveServer

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
PENALTIES = {
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {"13": 2.5, "262": -100},
}
STOPS = ["return", "name__} ha", "* 11 + 4", "\u00e9\ufffd"]  # one in each output
# Characters of several tokens, bytes that are none, and a special token, which has no text.
ODD = {"temperature": 2.0, "frequency_penalty": 1.0, "logit_bias": {"131": 97, "106": 97, "1": 95}}
TOP, TOKENS = 3, 24
SPELLED = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def given(params: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the `openai` client."""
    extra = {k: v for k, v in params.items() if k == "repetition_penalty"}
    return {**{k: v for k, v in params.items() if k not in extra}, "extra_body": extra}


def engine(params: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The same, of `SamplingParams`."""
    return {"sampling_seed" if k == "seed" else k: v for k, v in {**params, **more}.items()}


CASES: list[dict[str, Any]] = [
    {"seed": 3, **penalties, **stops}
    for penalties, stops in itertools.product(({}, PENALTIES, ODD), ({}, {"stop": STOPS}))
] + [{"temperature": 0.0, **PENALTIES}]  # fmt: skip


@pytest.mark.parametrize(
    ("params", "echo"),
    some_of([*((each, False) for each in CASES), *((each, True) for each in CASES[3:6])], 5, 7),
    ids=range(len(CASES) + 3),
)
def test_completions_equal_the_engine(
    server: LiveServer, llm: LLM, params: dict[str, Any], echo: bool
) -> None:
    asked = {"logprob_start_len": 0} if echo else {}
    want = llm.generate(
        PROMPT,
        engine(params, max_new_tokens=TOKENS),
        return_logprob=True,
        top_logprobs_num=TOP,
        **asked,
    )
    assert want.finish_reason["type"] == ("stop" if "stop" in params else "length")
    info = want.meta_info
    entries = [*info["input_token_logprobs"] * echo, *info["output_token_logprobs"]]
    tops = [*info["input_top_logprobs"] * echo, *info["output_top_logprobs"]]
    text = PROMPT * echo + want.text
    call = {
        "model": "bundled", "prompt": PROMPT, "max_tokens": TOKENS, "echo": echo, "logprobs": TOP,
        **given(params),
    }  # fmt: skip
    client = server.client()
    choice = client.completions.create(**call).choices[0]
    check_completion(choice.text, choice.logprobs, text, entries, tops)

    streamed, shown = (
        "",
        {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []},
    )
    for chunk in client.completions.create(**call, stream=True):
        part = chunk.choices[0]
        if part.logprobs is not None:
            # Never a token before its text, or after.
            assert min(part.logprobs.text_offset) >= len(streamed)
            assert max(part.logprobs.text_offset) <= len(streamed + part.text)
            for name, values in shown.items():
                values += getattr(part.logprobs, name)
        streamed += part.text
    assert streamed == text
    whole = choice.logprobs
    assert shown == {name: getattr(whole, name) for name in shown}


def check_completion(
    text: str, logprobs: Any, want: str, entries: list[Any], tops: list[Any]
) -> None:
    assert text == want
    assert logprobs.token_logprobs == [value for value, _, _ in entries]
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(entries)
    for mine, top, token, value in zip(
        logprobs.top_logprobs, tops, logprobs.tokens, logprobs.token_logprobs, strict=True
    ):
        if top is None:
            assert mine is None
            continue
        values = sorted({*(v for v, _, _ in top), value}, reverse=True)
        assert sorted(mine.values(), reverse=True) == values
        assert mine[token] == value
    offsets = logprobs.text_offset
    assert offsets == sorted(offsets)
    for token, start, end in zip(logprobs.tokens, offsets, offsets[1:], strict=False):
        if not token.startswith("bytes:") and not token.startswith("<|"):
            assert text[start:end] == token


@pytest.mark.parametrize("params", some_of([(each,) for each in CASES[1:6:2]], 2), ids=range(3))
def test_chat_equals_the_engine(server: LiveServer, llm: LLM, params: dict[str, Any]) -> None:
    want = llm.chat(
        MESSAGES, engine(params, max_new_tokens=TOKENS), return_logprob=True, top_logprobs_num=TOP
    )
    info = want.meta_info
    call = {
        "model": "bundled", "messages": MESSAGES, "max_tokens": TOKENS, "logprobs": True,
        "top_logprobs": TOP, **given(params),
    }  # fmt: skip
    client = server.client()
    choice = client.chat.completions.create(**call).choices[0]
    assert choice.message.content == want.text
    content = choice.logprobs.content
    assert [each.logprob for each in content] == [v for v, _, _ in info["output_token_logprobs"]]
    for mine, top in zip(content, info["output_top_logprobs"], strict=True):
        assert [each.logprob for each in mine.top_logprobs] == [value for value, _, _ in top]
        assert mine.token == bytes(mine.bytes).decode(errors="replace")

    streamed, parts = "", []
    for chunk in client.chat.completions.create(**call, stream=True):
        part = chunk.choices[0]
        streamed += part.delta.content or ""
        if part.logprobs is not None:
            parts += part.logprobs.content
    assert streamed == want.text
    assert parts == content


@pytest.mark.parametrize("params", some_of([(each,) for each in CASES[2:4]], 1), ids=range(2))
def test_generate_equals_the_engine(server: LiveServer, llm: LLM, params: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 2,
        "token_ids_logprob": [5, 7],
    }  # fmt: skip
    body = {"text": PROMPT, "sampling_params": engine(params, max_new_tokens=TOKENS), **asked}
    want = llm.generate(PROMPT, body["sampling_params"], **asked)
    names = [name for name in want.meta_info if name.endswith("_logprobs")]
    assert len(names) == 6
    expected = json.loads(json.dumps({name: want.meta_info[name] for name in names}))
    got = server.generate(**body)
    assert (got["text"], got["output_ids"]) == (want.text, want.output_ids)
    assert {name: got["meta_info"][name] for name in names} == expected
    with server.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line][:-1]
    *parts, last = map(json.loads, events)
    assert {name: last["meta_info"][name] for name in names} == expected
    for part in parts:
        info, count = part["meta_info"], len(part["output_ids"])
        assert info["input_token_logprobs"] == expected["input_token_logprobs"]
        for name in SPELLED:
            assert info[name] == expected[name][:count]


def test_generate_with_texts_and_values_per_prompt(server: LiveServer, llm: LLM) -> None:
    body = {
        "text": [PROMPT, "import "],
        "sampling_params": {"temperature": 0, "max_new_tokens": 4},
        "return_logprob": [True, False],
        "top_logprobs_num": [2, 0],
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }
    first, second = server.generate(**body)
    assert "output_token_logprobs" not in second["meta_info"]
    info = first["meta_info"]
    assert info["input_top_logprobs"][0] is None
    assert [len(top) for top in info["output_top_logprobs"]] == [2] * 4
    assert "".join(text for _, _, text in info["input_token_logprobs"]) == PROMPT
    assert "".join(text for _, _, text in info["output_token_logprobs"]) == first["text"]
    for value, token, text in info["output_top_logprobs"][0]:
        assert value < 0
        assert text == llm.tokenizer.decode([token])


def test_samples_and_prompts_have_their_own(server: LiveServer, llm: LLM) -> None:
    ids = [llm.tokenizer(text)["input_ids"] for text in (PROMPT, "import ")]
    want = llm.generate(
        input_ids=ids,
        sampling_params={"sampling_seed": 2, "n": 2, "max_new_tokens": 6},
        return_logprob=True,
    )
    got = server.client().completions.create(
        model="bundled", prompt=ids, seed=2, n=2, max_tokens=6, logprobs=0, echo=True
    )
    for choice, output in zip(got.choices, want, strict=True):
        prompt = ids[output.prompt_index]
        values = [value for value, _, _ in output.meta_info["output_token_logprobs"]]
        assert choice.logprobs.token_logprobs[len(prompt) :] == values
        assert [top and list(top) for top in choice.logprobs.top_logprobs] == [
            None,
            *([token] for token in choice.logprobs.tokens[1:]),
        ]
        assert "".join(choice.logprobs.tokens) == choice.text


def test_without_logprobs_there_are_none(server: LiveServer) -> None:
    client = server.client()
    call: dict[str, Any] = {"model": "bundled", "max_tokens": 2}
    assert client.completions.create(prompt=PROMPT, **call).choices[0].logprobs is None
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=False, **call)
    assert chat.choices[0].logprobs is None
    meta = server.generate(
        text=PROMPT, return_logprob=False, sampling_params={"max_new_tokens": 2}
    )["meta_info"]
    assert not [name for name in meta if "logprob" in name]


BOTH: list[tuple[str, Any]] = [
    ("frequency_penalty", 2.5),
    ("presence_penalty", -2.1),
    ("repetition_penalty", 0),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"five": 1}),
    ("temperature", -1),
    ("seed", 2**70),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((kind, *case) for kind in ("completions", "chat") for case in BOTH),
        ("completions", "logprobs", 21),
        ("completions", "logprobs", -1),
        ("completions", "logprobs", True),
        ("chat", "top_logprobs", 21),
        ("chat", "top_logprobs", 2),  # without logprobs
        ("chat", "logprobs", 2),
    ],
)
def test_values_out_of_range_name_their_parameter(
    server: LiveServer, kind: str, name: str, value: Any
) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError) as caught:
        if kind == "chat":
            client.chat.completions.create(
                model="bundled", messages=MESSAGES, extra_body={name: value}
            )
        else:
            client.completions.create(model="bundled", prompt=PROMPT, extra_body={name: value})
    assert caught.value.param == name
    assert caught.value.type == "invalid_request_error"
    assert name in caught.value.message or name == "seed"


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
@pytest.mark.parametrize("limit", [0, 1])
def test_prompts_can_be_scored(server: LiveServer, llm: LLM, limit: int, as_ids: bool) -> None:
    """As evaluation harnesses do: a batch, echoed, with the values of every prompt token."""
    texts = [PROMPT, "import os\n\n# 漢字 é"]
    ids = [llm.tokenizer(text)["input_ids"] for text in texts]
    got = server.client().completions.create(
        model="bundled",
        prompt=ids if as_ids else texts,
        temperature=0,
        max_tokens=limit,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    want = llm.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": limit},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
    )
    assert got.usage is not None and got.usage.completion_tokens == 2 * limit
    assert [choice.index for choice in got.choices] == [0, 1]
    for choice, output, prompt, text in zip(got.choices, want, ids, texts, strict=True):
        logprobs, info = choice.logprobs, output.meta_info
        assert len(output.output_ids) == limit and choice.finish_reason == "length"
        assert choice.text == text + output.text
        values = [*info["input_token_logprobs"], *info["output_token_logprobs"]]
        assert logprobs.token_logprobs == [value for value, _, _ in values]
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert len(logprobs.tokens) == len(prompt) + limit
        assert logprobs.text_offset[0] == 0
        assert [choice.text[at:][:1] for at in logprobs.text_offset[:3]] == [
            token[:1] for token in logprobs.tokens[:3]
        ]
        # Whether a text is what the model would have written: its tokens are the most probable.
        most = [top[0] for top in info["input_top_logprobs"][1:]]
        for at, (value, top) in enumerate(
            zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True), 1
        ):
            if at < len(prompt):
                assert (value == max(top.values())) == (value == most[at - 1][0])


def test_a_scoring_pass_has_the_bits_of_generation(server: LiveServer) -> None:
    """What a trainer needs of rollouts with drafts: the same log-probabilities, to the last bit."""
    complete = server.client().completions.create
    asked: dict[str, Any] = {"model": "bundled", "logprobs": 0}
    for seed, temperature in ((0, 0.0), (1, 0.8), (2, 1.3)):
        more = {"return_token_ids": True, "ignore_eos": True, "top_p": 0.95}
        (rollout,) = complete(
            prompt=PROMPT, max_tokens=48, temperature=temperature, seed=seed,
            extra_body=more, **asked,
        ).choices  # fmt: skip
        ids = [*rollout.prompt_token_ids, *rollout.token_ids]
        (scored,) = complete(
            prompt=ids, max_tokens=0, echo=True, temperature=temperature, **asked
        ).choices
        values = scored.logprobs.token_logprobs[len(rollout.prompt_token_ids) :]
        assert values == rollout.logprobs.token_logprobs
        assert len(values) == 48 and len(set(values)) > 1


def test_a_prompt_alone(server: LiveServer, llm: LLM) -> None:
    call = {"return_logprob": True, "logprob_start_len": 0}
    params = {"max_new_tokens": 0, "temperature": 0}
    native = server.generate(text=PROMPT, sampling_params=params, **call)
    want = llm.generate(PROMPT, params, **call)
    assert (native["text"], native["output_ids"]) == ("", [])
    info = native["meta_info"]
    assert info["completion_tokens"] == 0 and info["finish_reason"]["type"] == "length"
    given = want.meta_info["input_token_logprobs"]
    assert [entry[0] for entry in info["input_token_logprobs"]] == [entry[0] for entry in given]
    assert info["output_token_logprobs"] == []
    streamed = list(
        server.client().completions.create(
            model="bundled", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == PROMPT
    assert streamed[-1].choices[0].finish_reason == "length"
    plain = server.client().completions.create(
        model="bundled", prompt=PROMPT, max_tokens=0, echo=True, n=2
    )
    assert [choice.text for choice in plain.choices] == [PROMPT] * 2
