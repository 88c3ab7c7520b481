"""vLLM's names, with the unmodified `openai` client: the same answers as under Forerun's."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import openai
import pytest

from forerun import LLM, __version__
from forerun.core.errors import RequestError
from forerun.llm.prompts import Ending, chat_ids
from forerun.server.http.strict_model import StrictModel
from forerun.server.openai.chat_prompt import ChatPrompt
from forerun.server.openai.protocol import ChatRequest, CompletionRequest
from tests.server.scripted import tokenizer
from tests.server.support import PROMPT, QUESTION, LiveServer


def post(server: LiveServer, path: str, body: Any) -> Any:
    got = httpx.post(server.url + path, json=body, timeout=60)
    assert got.status_code == 200, got.text
    return got.json()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}}
CHOICES = ["yes", 'no "\\{}|', "漢字\n\t", "a.b*"]
GRAMMAR = 'root ::= "x" [0-9]'
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "ok"}}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_regex": "[ab]{3}"}, {"regex": "[ab]{3}"}),
        ({"guided_grammar": GRAMMAR}, {"ebnf": GRAMMAR}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": GRAMMAR}}, {"ebnf": GRAMMAR}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": TAG}),
        ({"guided_json": None, "structured_outputs": None}, {}),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"guided_json": SCHEMA, "json_schema": SCHEMA}, {"json_schema": SCHEMA}),
    ],
)
def test_names(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    bodies: list[tuple[type[StrictModel], dict[str, Any]]] = [
        (CompletionRequest, {"prompt": "x"}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    ]
    for model, body in bodies:
        assert model.model_validate(body | theirs) == model.model_validate(body | ours)


@pytest.mark.parametrize("given", ["guided_choice", "structured_outputs"])
def test_choices(server: LiveServer, given: str) -> None:
    client, seen = server.client(), set()
    for choices in ([choice] for choice in CHOICES):
        extra = {given: {"choice": choices} if given == "structured_outputs" else choices}
        got = client.completions.create(
            model="bundled", prompt=PROMPT, max_tokens=40, extra_body=extra
        )
        assert got.choices[0].finish_reason == "stop"
        seen.add(got.choices[0].text)
    assert seen == set(CHOICES)
    chat = client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=40,
        extra_body={"guided_choice": CHOICES, "guided_decoding_backend": "outlines"},
    )
    assert chat.choices[0].message.content in CHOICES


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"guided_json": SCHEMA, "regex": "a"}, "guided_json and regex are set; an output"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            r"structured_outputs.regex and structured_outputs.choice are set; an output follows",
        ),
        ({"guided_regex": "a", "regex": "b"}, "guided_regex and regex are set"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex are set"),
        ({"guided_choice": []}, "list of 1 to"),
        ({"guided_choice": ["a", 1]}, "list of strings"),
        ({"structured_outputs": {"jsn": SCHEMA}}, "has no 'jsn'"),
        ({"structured_outputs": "x"}, "must be an object"),
        ({"guided_regex": 5}, "regex"),
    ],
)
def test_conflicts_and_mistakes(server: LiveServer, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        server.client().completions.create(
            model="bundled", prompt=PROMPT, max_tokens=2, extra_body=extra
        )


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"guided_whitespace_pattern": "[ ]?"}, "guided_whitespace_pattern"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "[ ]?"}, "regex": "a"},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_what_is_ignored_is_logged(
    caplog: pytest.LogCaptureFixture, extra: dict[str, Any], name: str
) -> None:
    with caplog.at_level(logging.INFO, "forerun"):
        body = CompletionRequest.model_validate({"prompt": "x", **extra})
    assert body == CompletionRequest.model_validate({"prompt": "x", "regex": extra.get("regex")})
    assert f"{name} is ignored" in caplog.text


TEMPLATE = (
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "end e "}]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "<user>q</end><assistant>end e </end><assistant>"),
        ({"add_generation_prompt": False}, "<user>q</end><assistant>end e </end>"),
        ({"continue_final_message": True}, "<user>q</end><assistant>end e "),
        (
            {"reasoning_effort": "low", "add_generation_prompt": True},
            "[low]<user>q</end><assistant>end e </end><assistant>",
        ),
    ],
)
def test_how_a_prompt_ends(fields: dict[str, Any], text: str) -> None:
    made, body = tokenizer(TEMPLATE), ChatPrompt.model_validate(fields)
    (ids,), _ = chat_ids(made, TALK, body.variables, ending=body.ending)
    assert made.decode(ids) == text


def prompt(**fields: Any) -> ChatPrompt:
    return ChatPrompt.model_validate(fields)


def test_what_cannot_be_continued() -> None:
    for talk in (TALK[:1], [{"role": "assistant", "content": ""}]):
        with pytest.raises(RequestError, match="continue_final_message needs"):
            chat_ids(tokenizer(TEMPLATE), talk, ending=Ending(False, True))
    with pytest.raises(RequestError, match="does not write"):
        chat_ids(tokenizer("fixed"), TALK, ending=Ending(False, True))
    with pytest.raises(RequestError, match="both true"):
        _ = prompt(continue_final_message=True, add_generation_prompt=True).ending


def test_effort_is_a_variable_of_the_template() -> None:
    assert prompt(reasoning_effort="none").variables == {
        "enable_thinking": False,
        "thinking": False,
        "reasoning_effort": "none",
    }
    with pytest.raises(RequestError, match="differ"):
        _ = prompt(
            reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}
        ).variables


def test_a_message_is_continued(server: LiveServer, llm: LLM) -> None:
    messages: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "def f(x):\n    return"},
    ]
    client = server.client()
    call: dict[str, Any] = {"model": "bundled", "messages": messages, "temperature": 0}
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    got = client.chat.completions.create(
        **call, max_tokens=8, extra_body={**extra, "return_token_ids": True}
    )
    ids = post(server, "/tokenize", {"messages": messages, "continue_final_message": True})[
        "tokens"
    ]
    assert llm.tokenizer.decode(ids).endswith("return")
    want = llm.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 8})
    assert got.choices[0].message.content == want.text
    with pytest.raises(openai.BadRequestError, match="both true"):
        both = {"continue_final_message": True, "add_generation_prompt": True}
        client.chat.completions.create(**call, extra_body=both)
    low = client.chat.completions.create(**call, max_tokens=1, reasoning_effort="low")
    assert low.choices


def test_tokens_and_back(server: LiveServer, llm: LLM) -> None:
    text = "x = 漢字 é"
    whole = post(server, "/tokenize", {"prompt": text, "return_token_strs": True})
    ids = llm.tokenizer(text)["input_ids"]
    assert (whole["tokens"], whole["count"]) == (ids, len(ids))
    assert whole["token_strs"] == llm.tokenizer.convert_ids_to_tokens(ids)
    bare = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert bare == llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    back = post(server, "/detokenize", {"tokens": bare})
    assert back == {"prompt": text, "text": text}
    lists = post(server, "/tokenize", {"prompt": [text, "y"]})
    assert lists["tokens"][0] == ids and lists["count"][0] == len(ids)
    assert post(server, "/detokenize", {"tokens": [bare, bare]})["text"] == [text] * 2


def test_what_a_client_needs_that_tokenizes_here(server: LiveServer, llm: LLM) -> None:
    info, tokenizer = server.get("/tokenizer_info"), llm.tokenizer
    assert info["chat_template"] == tokenizer.chat_template
    assert info["eos_token"] == tokenizer.eos_token
    ids = post(server, "/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})
    assert ids["tokens"] == [tokenizer.eos_token_id]


def test_version_and_ping(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert json.loads(http.get("/version").content) == {"version": __version__}
        assert http.get("/ping").status_code == http.post("/ping").status_code == 200
        assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400


@pytest.mark.parametrize(
    "extra",
    [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}],
)
def test_responses_take_the_same_names(server: LiveServer, extra: dict[str, Any]) -> None:
    pytest.importorskip("xgrammar")
    call: Any = {"model": "bundled", "input": QUESTION, "max_output_tokens": 8}
    answer = server.client().responses.create(**call, extra_body={**extra, "seed": 1})
    ours = {"ebnf": 'root ::= "yes" | "no"', "seed": 1}
    assert answer.output_text in ("yes", "no")
    assert (
        answer.output_text == server.client().responses.create(**call, extra_body=ours).output_text
    )
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    both = {"guided_json": SCHEMA, "text": {"format": form}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format and json_schema are set"):
        server.client().responses.create(**call, extra_body=both)
    both = {**extra, "text": {"format": {"type": "json_object"}}}
    with pytest.raises(openai.BadRequestError, match="ebnf and json_object are set; an output"):
        server.client().responses.create(**call, extra_body=both)
    with pytest.raises(openai.BadRequestError, match=r"regex and .*choice are set; an output"):
        server.client().responses.create(**call, extra_body={**extra, "regex": "a"})
