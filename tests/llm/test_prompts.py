"""Prompts and messages: what is taken, and one line for the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from forerun import LLM
from forerun.core.errors import RequestError
from forerun.llm.bundled import bundled
from forerun.llm.prompts import chat_ids, text_ids, token_lists
from tests.golden_engine import golden_llm

LONG = "x" * 100_000
ASK = {"role": "user", "content": "What is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:..."}}


@cache
def tokenizer(template: str | None = None) -> Any:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(str(bundled("target")), local_files_only=True)
    if template is not None:
        made.chat_template = template
    return made


def rendered(messages: Any, template: str | None = None) -> str:
    ids, single = chat_ids(tokenizer(template), messages)
    assert single and len(ids) == 1
    return str(tokenizer().decode(ids[0]))


def test_text_parts_are_text() -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]
    assert rendered([{"role": "user", "content": parts}]) == rendered(
        [{"role": "user", "content": "What is\nthis?"}]
    )
    assert rendered([{"role": "user", "content": parts[:1]}]) == rendered(
        [{"role": "user", "content": "What is"}]
    )
    assert "What is this?" in rendered([ASK])


def test_one_conversation_or_many() -> None:
    one, single = chat_ids(tokenizer(), [ASK])
    assert single
    many, single = chat_ids(tokenizer(), [[ASK], (ASK, ASK)])
    assert not single and many[0] == one[0] and len(many) == 2


TOOLS = "{% for m in messages %}{{ m.role }}:{{ m.content or m.tool_calls[0].name }}|{% endfor %}"


def test_messages_without_content_go_to_the_template() -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    for message in (call, {**call, "content": None}):
        assert "assistant:f|" in rendered([ASK, message], TOOLS)
    with pytest.raises(RequestError, match="does not take these messages"):
        chat_ids(tokenizer(), [ASK, call])  # its template joins strings


def test_tools_reach_the_template() -> None:
    function = {"type": "function", "function": {"name": "f"}}
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}|"
    ids, _ = chat_ids(tokenizer(template), [ASK], tools=[function])
    assert tokenizer().decode(ids[0]) == "f|"
    assert rendered([ASK], template) == "|"
    for tools in ("f", ["f"], {"name": "f"}):
        with pytest.raises(RequestError, match="tools must be a list of functions"):
            chat_ids(tokenizer(template), [ASK], tools=tools)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (ASK, "put it into a list"),
        ([], "messages is empty"),
        ("hello", "must be a list of messages, got 'hello'"),
        (5, "must be a list of messages, got 5"),
        ([[]], "non-empty list of messages"),
        ([ASK, [ASK]], "needs 'role' and 'content'"),
        ([[ASK], ASK], "non-empty list of messages, got {"),
        ([{"role": "user"}], "needs 'role' and 'content'"),
        ([{"content": "x"}], "needs 'role' and 'content'"),
        ([{"role": 5, "content": "x"}], "needs 'role' and 'content'"),
        (["hello"], "needs 'role' and 'content', got 'hello'"),
        ([{"role": "user", "content": 5}], "must be text, got 5"),
        ([{"role": "user", "content": {"a": 1}}], "must be text, got {"),
        ([{"role": "user", "content": [IMAGE]}], "type 'image_url' is not supported"),
        ([{"role": "user", "content": ["x"]}], "{'type': 'text', 'text': ...}, got 'x'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs 'text', a string"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "needs 'text', a string"),
        ([{"role": "user", "content": None}], "content of a 'user' message must be text"),
        ([{"role": "user", "content": "a\ud800"}], r"lone surrogate, '\ud800'"),
        ([{"role": "user", "content": [{"type": LONG}]}], "is not supported"),
        ([{"role": LONG}], "needs 'role'"),
    ],
)
def test_bad_messages_are_refused_in_one_line(messages: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_ids(tokenizer(), messages)
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 400


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (5, "must be text or a list of texts, got 5"),
        ({"a": 1}, "must be text or a list"),
        (["x", 5], "must be text, got 5"),
        ("a\udfff", "lone surrogate"),
    ],
)
def test_bad_texts_are_refused(prompts: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        text_ids(tokenizer(), prompts)


def test_a_text_over_the_length_is_not_commented_on(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")  # its messages do not reach the root logger
    logger.addHandler(caplog.handler)
    try:
        (ids,), _ = text_ids(tokenizer("a tokenizer that has not warned yet"), "x" * 20_000)
    finally:
        logger.removeHandler(caplog.handler)
    assert len(ids) > 4096 and not caplog.records


def test_token_lists() -> None:
    assert token_lists([1, 2]) == ([[1, 2]], True)
    assert token_lists(([1], (2, 3))) == ([[1], [2, 3]], False)
    assert token_lists([]) == ([[]], True)
    for bad in ("12", 5, {1: 2}, [[1], 2]):
        with pytest.raises(RequestError, match="input_ids"):
            token_lists(bad)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with golden_llm(max_total_tokens=1024) as made:
        yield made


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"logprobs": 5}, "log-probabilities are asked for with generate("),
        ({"return_text_in_logprobs": True}, "log-probabilities come with token ids"),
        ({"return_logprob": "yes"}, "return_logprob must be true or false, got 'yes'"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num must be in [0, 20]"),
        ({"return_logprob": True, "logprob_start_len": 2}, "below the prompt's 2 tokens, got 2"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len must be >= 0"),
        ({"return_logprob": True, "token_ids_logprob": 5}, "must be a list of integers, got 5"),
        ({"return_logprob": True, "token_ids_logprob": [10**6]}, "outside the vocabulary"),
        ({"return_logprob": True, "token_ids_logprob": [1] * 129}, "at most 128 ids, got 129"),
        ({"return_logprob": [True]}, "return_logprob must be true or false, got [True]"),
        ({"top_logprobs_num": 2}, "top_logprobs_num is set without return_logprob"),
        ({"sampling_params": {"logit_bias": {10**6: 1}}}, "outside the vocabulary"),
        ({"image_data": "x"}, "text or token ids only"),
        ({"lora_path": "x"}, "adapter"),
        ({"regex": "x"}, "is a sampling parameter"),
        ({"frequency_penalty": 1}, "sampling_params={'frequency_penalty': ...}"),
        ({"temperature": 0}, "sampling_params={'temperature': ...}"),
        ({"prompt_token_ids": [1]}, "called input_ids here"),
        ({"max_tokens": 5}, "called max_new_tokens here"),
        ({"strem": True}, "Did you mean 'stream'"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"sampling_params": "x"}, "sampling_params"),
        ({"sampling_params": [{}, {}]}, "2 sampling_params for 1 prompts"),
    ],
)
def test_keywords_that_are_none_are_refused(llm: LLM, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(input_ids=[1, 2], **keywords)
    assert words in str(caught.value)
