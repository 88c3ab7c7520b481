"""`/v1/responses` with the `openai` client and a scripted engine, and with the bundled pair."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from forerun import LLM
from tests.server.scripted import Scripted
from tests.server.support import QUESTION, LiveServer
from tests.server.test_tools import CITY, HERMES, PLAIN, QWEN3, THINK
from tests.server.test_tools import TOOLS as CHAT_TOOLS

TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
ASK = "Is it warm in Zürich?"
LOGPROBS: Any = "message.output_text.logprobs"
BROKEN = '<tool_call>{"name": "now", "arguments": {"a": ]}}</tool_call>'
# (output, its items)
CASES: list[tuple[str, list[tuple[str, ...]]]] = [
    ("Yes.\n", [("message", "Yes.\n")]),
    (THINK + "Yes.", [("reasoning", "The user asks."), ("message", "Yes.")]),
    (
        THINK + HERMES + "\nDone.",
        [
            ("reasoning", "The user asks."),
            ("message", "I look."),
            ("function_call", "weather", CITY),
            ("function_call", "now", "{}"),
            ("message", "Done."),
        ],
    ),
    ("", []),
    (BROKEN, [("message", BROKEN)]),
]


def shape(response: Response) -> list[tuple[str, ...]]:
    items: list[tuple[str, ...]] = []
    for item in response.output:
        assert item.id
        if item.type == "function_call":
            assert item.call_id
            items.append((item.type, item.name, item.arguments))
        else:
            assert item.type in ("message", "reasoning")
            (part,) = item.content or []
            assert part.type in ("output_text", "reasoning_text")
            items.append((item.type, part.text))
    return items


@pytest.mark.parametrize(("script", "items"), CASES, ids=range(len(CASES)))
def test_responses(script: str, items: list[tuple[str, ...]]) -> None:
    response = Scripted(QWEN3, script).respond(input=ASK, tools=TOOLS, instructions="Be brief.")
    assert response.object == "response"
    assert response.status == "completed"
    assert shape(response) == items
    assert all(item.status == "completed" for item in response.output)
    assert response.output_text == "".join(text for kind, text, *_ in items if kind == "message")
    assert response.instructions == "Be brief."
    assert [tool.name for tool in response.tools] == ["weather", "now"]
    assert response.store is True
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    reasoning = 2 + len("\nThe user asks.\n") if THINK in script else 0
    assert usage.output_tokens_details.reasoning_tokens == reasoning


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(("script", "items"), CASES, ids=range(len(CASES)))
def test_streams(script: str, items: list[tuple[str, ...]], step: int) -> None:
    """The events build the response that comes last, which has no broken calls."""
    scripted = Scripted(QWEN3, script, step=step)
    events = scripted.respond(input=ASK, tools=TOOLS, stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress"
    assert events[-1].type == "response.completed"
    response = events[-1].response
    built = built_by(events[2:-1])
    complete = [item for item in built if item["status"] == "completed"]
    assert complete == [item.model_dump() for item in response.output]
    assert shape(response) == items


def built_by(events: list[Any]) -> list[dict[str, Any]]:
    """The items that the events describe. What is about an item is between its two events."""
    done: list[dict[str, Any]] = []
    text = arguments = ""
    item: Any = None
    part: Any = None
    for event in events:
        assert event.output_index == len(done)
        match event.type.removeprefix("response."):
            case "output_item.added":
                assert item is None
                item, text, arguments = event.item, "", ""
                assert item.status == "in_progress"
            case "content_part.added":
                assert part is None
                part = event.part
                assert part.text == ""
            case "output_text.delta" | "reasoning_text.delta":
                assert part.type == event.type[len("response.") : -len(".delta")]
                assert event.item_id == item.id
                text += event.delta
            case "output_text.done" | "reasoning_text.done":
                assert event.text == text
            case "content_part.done":
                assert event.part.text == text
                part = None
            case "function_call_arguments.delta":
                arguments += event.delta
            case "function_call_arguments.done":
                assert event.arguments == arguments
            case "output_item.done":
                assert part is None
                assert event.item.id == item.id
                done.append(event.item.model_dump())
                item = None
            case other:
                raise AssertionError(other)
    assert item is None
    return done


def test_a_broken_call_in_a_stream_is_incomplete() -> None:
    events = Scripted(QWEN3, BROKEN).respond(input=ASK, tools=TOOLS, stream=True)
    call, message = [e.item for e in events if e.type == "response.output_item.done"]
    assert (call.type, call.status, call.arguments) == ("function_call", "incomplete", '{"a": ')
    assert message.content[0].text == BROKEN


@pytest.mark.parametrize("script", [THINK + HERMES, BROKEN], ids=["calls", "broken"])
def test_the_clients_helpers_read_streams(script: str) -> None:
    async def respond(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(model="bundled", input=ASK, tools=TOOLS) as stream:
            return await stream.get_final_response()

    async def chat(client: openai.AsyncOpenAI) -> Any:
        asked: Any = [{"role": "user", "content": ASK}]
        now: Any = {"type": "function", "function": {"name": "now"}}  # strict: it would be parsed
        async with client.chat.completions.stream(
            model="bundled", messages=asked, tools=[CHAT_TOOLS[0], now]
        ) as stream:
            return await stream.get_final_completion()

    response = Scripted(QWEN3, script).run(respond)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ([CITY, "{}"] if script != BROKEN else [])
    message = Scripted(QWEN3, script).run(chat).choices[0].message
    (first, *_) = message.tool_calls
    assert first.function.arguments == ('{"a": ' if script == BROKEN else CITY)
    assert message.content == (BROKEN if script == BROKEN else "I look.")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_too_long_is_incomplete(stream: bool) -> None:
    got = Scripted(QWEN3, "One two three").respond(input=ASK, max_output_tokens=5, stream=stream)
    if stream:
        assert got[-1].type == "response.incomplete"
        got = got[-1].response
    assert got.status == "incomplete"
    assert got.incomplete_details.reason == "max_output_tokens"
    assert got.output_text == "One t"
    assert got.output[0].status == "incomplete"
    assert got.usage.output_tokens == 5


def test_input_items_reach_the_template() -> None:
    """The output of a response can be sent back, with the results of its calls."""
    first = Scripted(QWEN3, THINK + HERMES).respond(input=ASK, tools=TOOLS)
    calls = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"result {i}"}
        for i, call in enumerate(calls)
    ]
    scripted = Scripted(QWEN3, "Yes.")
    scripted.respond(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "In English."},
            {"role": "user", "content": [{"type": "input_text", "text": ASK}]},
            *[item.model_dump() for item in first.output],
            *results,
        ],
    )
    (prompt,) = scripted.engine.prompts
    written = HERMES.replace('"now"}', '"now", "arguments": {}}')
    turn = f"<assistant><think>The user asks.</think>{written}<|im_end|>"
    assert prompt == (
        f"<system>Be brief.\n\nIn English.<|im_end|><user>{ASK}<|im_end|>{turn}"
        "<tool>result 0<|im_end|><tool>result 1<|im_end|><assistant>"
    )


def test_thinking_can_be_switched_off() -> None:
    scripted = Scripted(QWEN3, "Yes.")
    scripted.respond(input=ASK, reasoning={"effort": "none"})
    assert scripted.engine.prompts[0].endswith("</think>\n\n")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": ASK, "background": True, "store": False}, "does not go with store: false"),
    ({"input": ASK, "background": True, "stream": True}, "does not go with stream: true"),
    ({"input": ASK, "previous_response_id": "a", "conversation": "b"}, "are set; give one"),
    ({"input": []}, "input is an empty list"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference is not supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "must be text"),
    ({"input": [{"role": "user", "content": 5}]}, "must be text or parts"),
    ({"input": [{"type": "computer_call"}]}, "An item of input must be"),
    ({"input": ASK, "tools": [{"type": "web_search"}]}, "'function'"),
    (
        {"input": ASK, "tools": TOOLS, "tool_choice": {"type": "function", "name": "nov"}},
        "Did you mean 'now'",
    ),
    ({"input": ASK, "text": {"format": {"type": "xml"}}}, "text.format.type must be"),
    ({"input": ASK, "text": {"format": {"type": "json_schema", "name": "x"}}}, "name and a schema"),
    (
        {"input": ASK, "text": {"format": {"type": "json_schema", "scheme": {}, "schema": {}}}},
        "text.format has no 'scheme'. Did you mean 'schema'",
    ),
    ({"input": ASK, "include": ["message.output_text.logprob"]}, "Did you mean 'message.output_"),
    ({"input": ASK, "top_logprobs": 2}, "set include to"),
    ({"input": ASK, "include": [LOGPROBS], "top_logprobs": 21}, "less than or equal to 20"),
    ({"input": ASK, "extra_body": {"frequency_penalty": 3}}, "frequency_penalty must be"),
    ({"input": ASK, "reasoning": {"effort": "huge"}}, "'none', 'minimal'"),
    ({"input": ASK, "truncation": "auto"}, "shorten the input"),
    ({"input": ASK, "temperature": -1}, "temperature must be"),
    ({"input": ASK, "extra_body": {"inptu": 1}}, "Did you mean 'input'"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=range(len(REFUSED)))
def test_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        Scripted(QWEN3).respond(**body)
    assert words in str(caught.value)


def test_what_changes_nothing_is_accepted() -> None:
    response = Scripted(PLAIN, "Yes.").respond(
        input=ASK,
        store=False,
        background=False,
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        text={"format": {"type": "text"}},
        tools=[],
        tool_choice="auto",
        metadata={"a": "b"},
        user="someone",
    )
    assert response.output_text == "Yes."
    assert response.metadata == {"a": "b"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize(("script", "items"), CASES, ids=range(len(CASES)))
def test_logprobs_are_those_of_the_messages(
    script: str, items: list[tuple[str, ...]], step: int
) -> None:
    """One token per byte here: together they spell the messages, and nothing else."""
    asked: Any = {"input": ASK, "tools": TOOLS, "include": [LOGPROBS]}
    whole = Scripted(QWEN3, script, step=step).respond(**asked)
    events = Scripted(QWEN3, script, step=step).respond(**asked, stream=True)
    for response in (whole, events[-1].response):
        assert shape(response) == items
        values = []
        for item in response.output:
            for part in item.content if item.type == "message" else ():
                assert b"".join(bytes(t.bytes) for t in part.logprobs).decode() == part.text
                values += [token.logprob for token in part.logprobs]
        assert values == sorted(set(values), reverse=True)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    spelled = [token.token for event in deltas for token in event.logprobs]
    assert "".join(spelled) == "".join(event.delta for event in deltas)


def test_formats_and_penalties_reach_the_engine() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats: list[tuple[Any, str]] = [
        ({"type": "json_schema", "name": "x", "schema": schema, "strict": True}, '"integer"'),
        ({"type": "json_object"}, '{"type":"object"}'),
    ]
    for form, words in formats:
        scripted = Scripted(PLAIN, "{}")
        response = scripted.respond(input=ASK, text={"format": form})
        assert words in scripted.engine.grammars[0].text
        assert response.text.format.model_dump(by_alias=True, exclude_none=True) == form
    body = {"frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": {"5": 2}}
    scripted = Scripted(PLAIN, "{}")
    response = scripted.respond(input=ASK, extra_body={**body, "repetition_penalty": 1.5})
    assert response.model_extra["frequency_penalty"] == 0.5
    assert response.model_extra["presence_penalty"] == -1
    params = scripted.engine.params[0]
    assert (params.frequency_penalty, params.presence_penalty) == (0.5, -1)
    assert (params.repetition_penalty, params.logit_bias) == (1.5, ((5, 2.0),))


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_that_must_be_called(stream: bool) -> None:
    for choice in ("required", {"type": "function", "name": "weather"}):
        call = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
        scripted = Scripted(QWEN3, call)
        got = scripted.respond(input=ASK, tools=TOOLS, tool_choice=choice, stream=stream)
        response = got[-1].response if stream else got
        assert shape(response) == [("function_call", "weather", CITY)]
        (grammar,) = scripted.engine.grammars
        assert ("now" in grammar.text) == (choice == "required")
        echoed = response.tool_choice
        assert (echoed if isinstance(echoed, str) else echoed.model_dump()) == choice


def test_responses_equal_the_engine(server: LiveServer, llm: LLM) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    want = llm.chat(messages, {"sampling_seed": 1, "max_new_tokens": 200})
    client = server.client()
    call: Any = {"model": "bundled", "input": QUESTION, "max_output_tokens": 200}
    whole = client.responses.create(**call, extra_body={"seed": 1})
    assert whole.output_text == want.text
    assert whole.usage is not None
    assert whole.usage.output_tokens == len(want.output_ids)
    assert whole.usage.input_tokens == len(want.prompt_token_ids)
    events = list(client.responses.create(**call, extra_body={"seed": 1}, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == want.text
    assert events[-1].type == "response.completed"
    with client.responses.stream(**call, extra_body={"seed": 1}) as stream:
        assert stream.get_final_response().output_text == want.text
    server.wait_idle()


def test_a_stream_that_fails_ends_with_an_event_of_its_kind(server: LiveServer) -> None:
    body = {"input": QUESTION, "ignore_eos": True, "request_timeout": 0.2}
    answer = server.http.post("/v1/responses", json={**body, "stream": True})
    *before, last = answer.text.strip().split("\n\n")
    name, data = last.split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["code"]) == ("event: error", "error", "timeout")
    assert error["sequence_number"] == len(before)
    assert error["message"] == error["error"]["message"]
    client = server.client(max_retries=0)
    with pytest.raises(openai.APIError, match="request_timeout"):
        list(client.responses.create(model="bundled", input=QUESTION, stream=True, extra_body=body))
    server.wait_idle()


def test_formats_and_logprobs_equal_the_engine(server: LiveServer, llm: LLM) -> None:
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}}
    params = {"sampling_seed": 3, "max_new_tokens": 30, "json_schema": schema}
    penalties = {"frequency_penalty": 0.7, "presence_penalty": -0.2}
    want = llm.chat(
        [{"role": "user", "content": QUESTION}],
        {**params, **penalties},
        return_logprob=True,
        top_logprobs_num=2,
    )
    call: Any = {
        "model": "bundled",
        "input": QUESTION,
        "max_output_tokens": 30,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        "include": [LOGPROBS],
        "top_logprobs": 2,
        "extra_body": {"seed": 3, **penalties},
    }
    client = server.client()
    whole = client.responses.create(**call)
    events = list(client.responses.create(**call, stream=True))
    entries = want.meta_info["output_token_logprobs"]
    for response in (whole, events[-1].response):  # type: ignore[union-attr]
        assert response.output_text == want.text
        got = response.output[0].content[0].logprobs
        # The end has no text.
        assert [token.logprob for token in got] == [value for value, _, _ in entries[: len(got)]]
        assert len(got) >= len(entries) - 1
        assert {len(token.top_logprobs) for token in got} == {2}
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [token.logprob for event in deltas for token in event.logprobs or ()]
    assert streamed == [value for value, _, _ in entries[: len(streamed)]]
