"""The real `openai` client against a live server: shapes, and equality with `LLM`."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from forerun import LLM
from tests.covering import some_of
from tests.server.support import PROMPT, QUESTION, LiveServer

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
PENALTIES: Any = {
    "frequency_penalty": 0.6,
    "presence_penalty": -0.4,
    "logit_bias": {"13": 3, "262": -100},
}
STOPS = ["return", "\n\n"]
# (parameters of the OpenAI API, the same of `SamplingParams`)
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"seed": 7}, {"sampling_seed": 7}),
    ({"seed": 3, "top_p": 0.9}, {"sampling_seed": 3, "top_p": 0.9}),
    ({"seed": 5, "stop": STOPS}, {"sampling_seed": 5, "stop": STOPS}),
    ({"temperature": 0, "stop": "b"}, {"temperature": 0.0, "stop": "b"}),
    (
        {"seed": 11, "extra_body": {"top_k": 5, "min_p": 0.05, "ignore_eos": True}},
        {"sampling_seed": 11, "top_k": 5, "min_p": 0.05, "ignore_eos": True},
    ),
    (
        {"seed": 12, "extra_body": {"top_n_sigma": 0.7, "ignore_eos": True}},
        {"sampling_seed": 12, "top_n_sigma": 0.7, "ignore_eos": True},
    ),
    (
        {"seed": 2, "extra_body": {"min_tokens": 30, "stop_token_ids": [13, 29, 262]}},
        {"sampling_seed": 2, "min_new_tokens": 30, "stop_token_ids": [13, 29, 262]},
    ),
    ({"seed": 4, "extra_body": {"speculative": False}}, {"sampling_seed": 4, "speculative": False}),
    (
        {**PENALTIES, "seed": 8, "extra_body": {"repetition_penalty": 1.3, "max_draft_tokens": 2}},
        {**PENALTIES, "sampling_seed": 8, "repetition_penalty": 1.3, "max_draft_tokens": 2},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "params"), some_of(CASES, 6, 8, 9), ids=lambda case: "-".join(case)
)
def test_completions_equal_the_engine(
    server: LiveServer, llm: LLM, given: dict[str, Any], params: dict[str, Any]
) -> None:
    want = llm.generate(PROMPT, {**params, "max_new_tokens": 40})
    extra = {**given.get("extra_body", {}), "return_token_ids": True, "return_spec_info": True}
    call = {**given, "model": "bundled", "prompt": PROMPT, "max_tokens": 40, "extra_body": extra}
    client = server.client()

    whole = client.completions.create(**call)
    choice = whole.choices[0]
    assert (choice.text, choice.token_ids) == (want.text, want.output_ids)
    assert choice.finish_reason == want.finish_reason["type"]
    assert choice.matched_stop == want.finish_reason.get("matched")
    assert choice.prompt_token_ids == want.prompt_token_ids
    details = whole.usage.completion_tokens_details
    info = want.meta_info
    assert details.accepted_prediction_tokens == info["spec_num_correct_drafts"]
    assert (
        details.rejected_prediction_tokens
        == info["spec_num_proposed_drafts"] - info["spec_num_correct_drafts"]
    )
    assert details.spec_accept_length == info["spec_accept_length"]
    assert whole.usage.completion_tokens == len(want.output_ids)

    chunks = list(
        client.completions.create(**call, stream=True, stream_options={"include_usage": True})
    )
    *parts, last = chunks
    assert "".join(part.choices[0].text for part in parts) == want.text
    assert [i for part in parts for i in part.choices[0].token_ids] == want.output_ids
    assert parts[-1].choices[0].finish_reason == want.finish_reason["type"]
    assert all(part.choices[0].finish_reason is None for part in parts[:-1])
    assert last.choices == []
    assert last.usage.completion_tokens == len(want.output_ids)


@pytest.mark.parametrize(("given", "params"), some_of(CASES, 3, 8), ids=lambda case: "-".join(case))
def test_parameters_of_chats_equal_the_engine(
    server: LiveServer, llm: LLM, given: dict[str, Any], params: dict[str, Any]
) -> None:
    want = llm.chat(MESSAGES, {**params, "max_new_tokens": 30})
    extra = {**given.get("extra_body", {}), "return_token_ids": True, "return_spec_info": True}
    call = {**given, "model": "bundled", "messages": MESSAGES, "extra_body": extra}
    client = server.client()
    whole = client.chat.completions.create(**call, max_tokens=30)
    choice = whole.choices[0]
    assert (choice.message.content, choice.token_ids) == (want.text, want.output_ids)
    assert choice.finish_reason == want.finish_reason["type"]
    assert choice.matched_stop == want.finish_reason.get("matched")
    assert whole.prompt_token_ids == want.prompt_token_ids
    details = whole.usage.completion_tokens_details
    assert details.spec_accept_length == want.meta_info["spec_accept_length"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = client.chat.completions.create(
        **call, max_completion_tokens=30, stream=True, stream_options=options
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == want.text
    # The first has the role, and no tokens.
    assert [i for part in parts[1:] for i in part.choices[0].token_ids] == want.output_ids
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == len(want.output_ids)
    assert last.usage.completion_tokens_details == details


def test_samples_of_chats(server: LiveServer, llm: LLM) -> None:
    want = llm.chat(MESSAGES, {"sampling_seed": 9, "n": 3, "max_new_tokens": 20})
    call = {"model": "bundled", "messages": MESSAGES, "seed": 9, "n": 3, "max_tokens": 20}
    client = server.client()
    whole = client.chat.completions.create(**call)
    assert [choice.message.content for choice in whole.choices] == [each.text for each in want]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**call, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [each.text for each in want]


def test_chat_equals_the_engine(server: LiveServer, llm: LLM) -> None:
    want = llm.chat(MESSAGES, {"sampling_seed": 1, "max_new_tokens": 200})
    client = server.client()
    call = {"model": "bundled", "messages": MESSAGES, "seed": 1, "max_completion_tokens": 200}
    whole = client.chat.completions.create(**call)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == want.text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens == len(want.prompt_token_ids)
    assert whole.usage.prompt_tokens_details.cached_tokens < whole.usage.prompt_tokens
    chunks = list(client.chat.completions.create(**call, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_samples_equal_the_engine(server: LiveServer, llm: LLM) -> None:
    want = llm.generate(PROMPT, {"sampling_seed": 9, "n": 3, "max_new_tokens": 20})
    call = {"model": "bundled", "prompt": PROMPT, "seed": 9, "n": 3, "max_tokens": 20}
    client = server.client()
    whole = client.completions.create(**call)
    assert [choice.text for choice in whole.choices] == [output.text for output in want]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.prompt_tokens == len(want[0].prompt_token_ids)
    texts = ["", "", ""]
    for chunk in client.completions.create(**call, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [output.text for output in want]
    many = client.chat.completions.create(
        model="bundled", messages=MESSAGES, n=2, max_tokens=5, temperature=0
    )
    assert many.choices[0].message.content == many.choices[1].message.content


def test_prompts_may_be_texts_and_ids(server: LiveServer, llm: LLM) -> None:
    client = server.client()
    texts = [PROMPT, "import "]
    ids = [llm.tokenizer(text)["input_ids"] for text in texts]
    want = [output.text for output in llm.generate(texts, {"temperature": 0, "max_new_tokens": 8})]
    for prompt, expected in ((texts, want), (ids, want), (ids[0], want[:1]), (texts[1], want[1:])):
        got = client.completions.create(model="bundled", prompt=prompt, temperature=0, max_tokens=8)
        assert [choice.text for choice in got.choices] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(server: LiveServer, llm: LLM, stream: bool) -> None:
    want = PROMPT + llm.generate(PROMPT, {"temperature": 0, "max_new_tokens": 8}).text
    for prompt in (PROMPT, llm.tokenizer(PROMPT)["input_ids"]):
        got = server.client().completions.create(
            model="bundled", prompt=prompt, temperature=0, max_tokens=8, echo=True, stream=stream
        )
        parts = got if stream else [got]
        assert "".join(part.choices[0].text for part in parts) == want


def test_template_variables_reach_the_template(server: LiveServer, llm: LLM) -> None:
    """The bundled template has none; what it does not read changes nothing."""
    kwargs = {"enable_thinking": False}
    want = llm.chat(MESSAGES, {"temperature": 0, "max_new_tokens": 8}, chat_template_kwargs=kwargs)
    got = server.client().chat.completions.create(
        model="bundled",
        messages=MESSAGES,
        temperature=0,
        max_tokens=8,
        extra_body={"chat_template_kwargs": kwargs, "return_token_ids": True},
    )
    assert got.choices[0].token_ids == want.output_ids
    assert got.prompt_token_ids == want.prompt_token_ids
    with pytest.raises(openai.BadRequestError, match="may not set 'chat_template'"):
        server.client().chat.completions.create(
            model="bundled",
            messages=MESSAGES,
            extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        )


def test_defaults_of_clients_are_accepted(server: LiveServer) -> None:
    got = server.client().chat.completions.create(
        model="bundled",
        messages=MESSAGES,
        max_tokens=4,
        frequency_penalty=0,
        presence_penalty=0.0,
        logprobs=False,
        logit_bias={},
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        user="someone",
        metadata={"a": "b"},
        parallel_tool_calls=True,
        stop=None,
        seed=None,
    )
    assert got.usage.completion_tokens == 4


def test_models(server: LiveServer) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["bundled"]
    assert client.models.retrieve("bundled").max_model_len == 4096
    with pytest.raises(openai.NotFoundError, match="Did you mean 'bundled'"):
        client.models.retrieve("bundeld")


@pytest.mark.exhaustive
def test_many_async_streams_at_once(server: LiveServer, llm: LLM) -> None:
    count = 10  # more than the server runs at the same time
    want = [
        llm.generate(PROMPT, {"sampling_seed": seed, "max_new_tokens": 16}).text
        for seed in range(count)
    ]

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="bundled", prompt=PROMPT, seed=seed, max_tokens=16, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(count)))

    assert asyncio.run(all_of_them()) == want
    server.wait_idle()
