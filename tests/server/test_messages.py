"""`/v1/messages` with the `anthropic` client: a scripted engine, and the bundled pair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from forerun import LLM
from forerun.server.http.sse import with_pings
from tests.property_examples import examples
from tests.server import test_tools
from tests.server.scripted import Scripted
from tests.server.support import QUESTION, LiveServer, flags
from tests.server.test_tools import CITY, HERMES, LLAMA3, PLAIN, QWEN3, R1, THINK


@pytest.fixture(autouse=True, scope="module")
def _client() -> None:
    """Importing it takes seconds, and few workers run these tests."""
    global anthropic
    anthropic = pytest.importorskip("anthropic")


ASK: Any = [{"role": "user", "content": "Is it warm in Zürich?"}]
TOOLS: Any = [
    {"name": "weather", "description": "Of a city", "input_schema": test_tools.SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]
BROKEN = '<tool_call>{"name": "now", "arguments": {"a": ]}}</tool_call>'
WEATHER = ("tool_use", "weather", json.loads(CITY))
# (output, its blocks)
CASES: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("Yes.\n", [("text", "Yes.\n")]),
    (THINK + "Yes.", [("thinking", "The user asks."), ("text", "Yes.")]),
    (
        THINK + HERMES + "\nDone.",
        [
            ("thinking", "The user asks."),
            ("text", "I look."),
            WEATHER,
            ("tool_use", "now", {}),
            ("text", "Done."),
        ],
    ),
    ("", []),
    (BROKEN, [("text", BROKEN)]),
]


class Claude(Scripted):
    """Anthropic's client of a scripted application."""

    def use(self, call: Callable[[anthropic.AsyncAnthropic], Any]) -> Any:
        async def used() -> Any:
            transport = httpx2.ASGITransport(self.app)
            async with (
                httpx2.AsyncClient(transport=transport) as http,
                anthropic.AsyncAnthropic(
                    base_url="http://localhost", api_key="k", http_client=http, max_retries=0
                ) as client,
            ):
                return await call(client)

        try:
            return asyncio.run(used())
        finally:
            self._text.close()

    def create(self, **body: Any) -> Any:
        """A message, or all events of a stream."""

        async def created(client: anthropic.AsyncAnthropic) -> Any:
            got = await client.messages.create(**asked(**body))
            return [event async for event in got] if body.get("stream") else got

        return self.use(created)

    def streamed(self, **body: Any) -> anthropic.types.Message:
        """What the client's helper builds from a stream."""

        async def final(client: anthropic.AsyncAnthropic) -> Any:
            async with client.messages.stream(**asked(**body)) as stream:
                return await stream.get_final_message()

        return self.use(final)


def asked(**body: Any) -> Any:
    return {"model": "bundled", "max_tokens": 1000, "messages": ASK, **body}


def shape(message: anthropic.types.Message) -> list[tuple[Any, ...]]:
    blocks: list[tuple[Any, ...]] = []
    for block in message.content:
        match block.type:
            case "tool_use":
                assert block.id.startswith("toolu_")
                blocks.append((block.type, block.name, block.input))
            case "thinking":
                assert block.signature
                blocks.append((block.type, block.thinking))
            case "text":
                blocks.append((block.type, block.text))
    assert len(blocks) == len(message.content)
    return blocks


@pytest.mark.parametrize(("script", "blocks"), CASES, ids=range(len(CASES)))
def test_messages(script: str, blocks: list[tuple[Any, ...]]) -> None:
    message = Claude(QWEN3, script).create(tools=TOOLS, system="Be brief.")
    assert (message.type, message.role, message.model) == ("message", "assistant", "bundled")
    assert shape(message) == blocks
    called = any(kind == "tool_use" for kind, *_ in blocks)
    assert message.stop_reason == ("tool_use" if called else "end_turn")
    assert message.stop_sequence is None
    details = message.usage.output_tokens_details
    thought = 2 + len("\nThe user asks.\n") if THINK in script else 0
    assert details is not None and details.thinking_tokens == thought
    assert message.usage.output_tokens >= thought


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(("script", "blocks"), CASES, ids=range(len(CASES)))
def test_streams(script: str, blocks: list[tuple[Any, ...]], step: int) -> None:
    whole = Claude(QWEN3, script, step=step).create(tools=TOOLS)
    built = Claude(QWEN3, script, step=step).streamed(tools=TOOLS)
    kept = [block for block in shape(built) if script != BROKEN or block[0] != "tool_use"]
    assert kept == shape(whole) == blocks
    assert built.stop_reason == whole.stop_reason
    assert built.usage == whole.usage


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "Yes", "é", "{", "}"),
        '<tool_call>{"name": "now"}</tool_call>',
        f'<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Z',
    ]
)


@examples(12, suppress_health_check=list(HealthCheck))
@given(
    script=st.lists(PIECES, max_size=8).map("".join),
    step=st.integers(1, 9),
    most=st.integers(1, 200),
)
def test_a_stream_builds_the_whole_message(script: str, step: int, most: int) -> None:
    """But for malformed calls, which a stream cannot take back."""
    body: Any = {"tools": TOOLS, "max_tokens": most}
    whole = Claude(QWEN3, script, step=step).create(**body)
    built = Claude(QWEN3, script, step=step).streamed(**body)
    assert built.stop_reason == whole.stop_reason
    assert built.usage == whole.usage
    of_whole = shape(whole)
    for block in shape(built):
        if of_whole and block == of_whole[0]:
            of_whole.pop(0)
        else:
            assert block[0] == "tool_use"
    assert not of_whole


def test_the_events_are_anthropics() -> None:
    events = Claude(QWEN3, THINK + HERMES).create(tools=TOOLS, stream=True)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert set(kinds[1:-2]) == {
        *("content_block_start", "content_block_delta", "content_block_stop"),
    }
    begun = events[0].message
    assert begun.content == [] and begun.stop_reason is None
    opened: int | None = None
    count = 0
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert opened is None and event.index == count
            opened, count = event.index, count + 1
        else:
            assert event.index == opened
            opened = None if event.type == "content_block_stop" else opened
    deltas = [e.delta for e in events if e.type == "content_block_delta"]
    pieces = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert "".join(pieces[:-1]) == CITY and len(pieces) > 5  # as they come; then those of `now`
    assert sum(delta.type == "signature_delta" for delta in deltas) == 1


def test_pings_reach_the_wire() -> None:
    body = json.dumps(asked(stream=True)).encode()
    text = Scripted(QWEN3, "Yes.").post("/v1/messages?beta=true", body).text
    assert text.startswith("event: message_start\ndata: {")
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in text
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


def test_a_silent_stream_pings_and_ends_with_its_reader() -> None:
    closed = asyncio.Event()

    async def source() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.sleep(0.2)
            yield b"b"
            await asyncio.sleep(1000)
        finally:
            closed.set()

    async def read() -> list[bytes]:
        got = []
        pinged = with_pings(source(), b"ping", 0.05)
        async for data in pinged:
            got.append(data)
            if data == b"b":
                break
        await pinged.aclose()
        await asyncio.wait_for(closed.wait(), 1)
        return got

    got = asyncio.run(read())
    assert (got[0], got[-1]) == (b"a", b"b") and len(got) > 2
    assert set(got[1:-1]) == {b"ping"}


def test_why_an_answer_ends() -> None:
    message = Claude(PLAIN, "Yes. No.").create(max_tokens=3)
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "Yes")
    long = Claude(PLAIN, "Yes.").streamed(max_tokens=10**9)  # more than there is room for
    assert long.stop_reason == "end_turn"


def test_a_call_that_max_tokens_cuts_off() -> None:
    script = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
    body = {"tools": TOOLS, "max_tokens": 55}
    whole = Claude(QWEN3, script).create(**body)
    assert whole.stop_reason == "max_tokens"
    ((kind, name, given_),) = shape(whole)
    assert (kind, name) == ("tool_use", "weather") and isinstance(given_, dict)
    assert shape(Claude(QWEN3, script).streamed(**body)) == shape(whole)


def test_a_tool_loop_goes_on_with_what_it_was_given() -> None:
    """As Claude Code does: the answer's blocks are sent back as they came, with results."""
    first = Claude(QWEN3, THINK + HERMES).streamed(tools=TOOLS)
    uses = [block for block in first.content if block.type == "tool_use"]
    results: Any = [
        {"type": "tool_result", "tool_use_id": uses[0].id, "content": "20 °C"},
        {
            "type": "tool_result",
            "tool_use_id": uses[1].id,
            "content": [{"type": "text", "text": "no clock"}],
            "is_error": True,
        },
        {"type": "text", "text": "Go on."},
    ]
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "In English."},
    ]
    turns = [*ASK, first.to_param(), {"role": "user", "content": results}]
    scripted = Claude(QWEN3, "Yes.")
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    more: Any = {"metadata": {"user_id": "u"}, "thinking": thinking, "max_tokens": 32000}
    last = scripted.streamed(messages=turns, tools=TOOLS, system=system, **more)
    assert last.stop_reason == "end_turn"
    prompt = scripted.engine.prompts[0]
    definitions, _, rest = prompt.partition("[tools ")[2].partition("]<system>")
    assert [tool["function"]["name"] for tool in json.loads(definitions)] == ["weather", "now"]
    written = HERMES.replace('"now"}', '"now", "arguments": {}}')
    assert rest == (
        f"Be brief.\nIn English.<|im_end|><user>{ASK[0]['content']}<|im_end|>"
        f"<assistant><think>The user asks.</think>{written}<|im_end|>"
        "<tool>20 °C<|im_end|><tool>Error: no clock<|im_end|><user>Go on.<|im_end|><assistant>"
    )


def test_the_prompt_is_that_of_chat_completions() -> None:
    scripted, chat = Claude(QWEN3, "Yes."), Scripted(QWEN3, "Yes.")
    scripted.create(tools=TOOLS, system="Be brief.")
    functions = [
        {"name": tool["name"], "parameters": tool["input_schema"]}
        | ({"description": "Of a city"} if tool["name"] == "weather" else {})
        for tool in TOOLS
    ]
    chat.chat(
        messages=[{"role": "system", "content": "Be brief."}, *ASK],
        tools=[{"type": "function", "function": function} for function in functions],
    )
    assert scripted.engine.prompts == chat.engine.prompts


def test_neighbours_of_a_role_are_one_message() -> None:
    scripted = Claude(PLAIN, "Yes.")
    scripted.create(messages=[*ASK, {"role": "user", "content": [{"type": "text", "text": "b"}]}])
    assert scripted.engine.prompts == [f"<user>{ASK[0]['content']}\nb<|im_end|><assistant>"]


def test_a_last_message_of_the_assistant_goes_on() -> None:
    scripted = Claude(PLAIN, " 7.")
    message = scripted.create(messages=[*ASK, {"role": "assistant", "content": "It is"}])
    assert scripted.engine.prompts[0].endswith("<assistant>It is")
    assert message.content[0].text == " 7."


def test_thinking_can_be_switched_off_and_left_out() -> None:
    scripted = Claude(QWEN3, "Yes.")
    scripted.create(thinking={"type": "disabled"})
    assert scripted.engine.prompts[0].endswith("</think>\n\n")
    omitted: Any = {"type": "adaptive", "display": "omitted"}
    message = Claude(QWEN3, THINK + "Yes.").create(thinking=omitted)
    assert shape(message) == [("text", "Yes.")]
    opened = Claude(R1, "The user asks.\n</think>\n\nYes.").create()
    assert shape(opened) == [("thinking", "The user asks."), ("text", "Yes.")]


CHOICES: list[tuple[Any, int, bool]] = [  # (tool_choice, functions in the grammar, one call only)
    ({"type": "any"}, 2, False),
    ({"type": "any", "disable_parallel_tool_use": True}, 2, True),
    ({"type": "tool", "name": "weather"}, 1, True),
]


@pytest.mark.parametrize(("choice", "functions", "single"), CHOICES, ids=range(len(CHOICES)))
def test_a_tool_that_must_be_used(choice: Any, functions: int, single: bool) -> None:
    call = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
    scripted = Claude(QWEN3, call)
    message = scripted.create(tools=TOOLS, tool_choice=choice)
    assert shape(message) == [WEATHER] and message.stop_reason == "tool_use"
    (grammar,) = scripted.engine.grammars
    assert sum(f'"name\\": \\"{t["name"]}' in grammar.text for t in TOOLS) == functions
    assert ('"stop_after_first":true' in grammar.text) == single


def test_one_tool_at_most_and_none() -> None:
    single: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = Claude(QWEN3, HERMES).create(tools=TOOLS, tool_choice=single)
    assert shape(message) == [("text", "I look."), WEATHER]
    scripted = Claude(QWEN3, HERMES)
    message = scripted.create(tools=TOOLS, tool_choice={"type": "none"})
    assert shape(message) == [("text", HERMES)]
    assert "[tools" not in scripted.engine.prompts[0]


def test_sampling_reaches_the_engine() -> None:
    scripted = Claude(PLAIN, "{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    scripted.create(
        stop_sequences=["\n\n", "END"], output_config=config,
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "min_p": 0.1},
    )  # fmt: skip
    (params,) = scripted.engine.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.sampling_seed, params.stop, params.max_new_tokens) == (5, ("\n\n", "END"), 1000)
    assert '"integer"' in scripted.engine.grammars[0].text


def test_count_tokens() -> None:
    async def count(client: anthropic.AsyncAnthropic) -> int:
        body: Any = {"model": "bundled", "messages": ASK, "system": "Be brief.", "tools": TOOLS}
        return (await client.messages.count_tokens(**body)).input_tokens

    scripted = Claude(QWEN3, "Yes.")
    usage = scripted.create(system="Be brief.", tools=TOOLS).usage
    assert Claude(QWEN3).use(count) == usage.input_tokens


IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}
USE: Any = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "toolu_1"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "user", "content": []}]}, "a user's message is empty"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "type 'image' are not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "type 'document' are not supported",
    ),
    (
        {
            "messages": [
                *ASK,
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [{**RESULT, "content": [IMAGE]}]},
            ]
        },
        "type 'image' are not supported",
    ),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "not the id of an earlier tool_use"),
    ({"messages": [*ASK, {"role": "assistant", "content": [USE]}]}, "add a message with its"),
    (
        {
            "messages": [
                *ASK,
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "x", "signature": "s"}],
                },
            ]
        },
        "the assistant's and has no text",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "'user', 'assistant' or 'system'"),
    ({"messages": [{"role": "user", "content": 5}]}, "text or a list of blocks"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "may be text, tool_result"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "needs a type"),
    ({"max_tokens": 0}, "max_tokens: input should be greater"),
    ({"extra_body": {"temperature": -1}}, "temperature must be"),
    ({"stop_sequences": [""]}, "stop_sequences must hold non-empty strings"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "The name of a function"),
    ({"tools": [{"name": "a"}]}, "input_schema is missing"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nov"}}, "Did you mean 'now'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice has a name"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
    ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "let the client use MCP"),
    ({"extra_body": {"max_tokns": 1}}, "Did you mean 'max_tokens'"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=range(len(REFUSED)))
def test_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        Claude(QWEN3).create(**body)
    answer: Any = caught.value.body
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert words in answer["error"]["message"]
    assert answer["request_id"] == caught.value.request_id


def test_errors_of_all_kinds_have_anthropics_shape() -> None:
    with pytest.raises(anthropic.NotFoundError, match=r"model .* does not exist"):
        Claude(QWEN3).create(model="claude-opus-9")
    with pytest.raises(anthropic.BadRequestError, match="cannot read tool calls"):
        Claude(PLAIN).create(tools=TOOLS)
    for path, body, kind in (
        ("/v1/messages", b"{", "invalid_request_error"),
        ("/v1/messages/batchez", b"{}", "not_found_error"),
        ("/v1/messages", b"x" * 2000, "request_too_large"),
    ):
        answer = Scripted(QWEN3, max_body_bytes=1000).post(path, body).json()
        assert answer["error"]["type"] == kind
    plain = Scripted(QWEN3).post("/v1/nothing", b"{}").json()
    assert plain["error"]["code"] is None  # OpenAI's
    asked_ = Scripted(QWEN3).post("/v1/nothing", b"{}", **{"anthropic-version": "2023-06-01"})
    assert asked_.json()["type"] == "error"


def test_an_error_in_a_stream_is_raised(server: LiveServer) -> None:
    more = {"request_timeout": 0.3, "ignore_eos": True}
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="request_timeout"),
    ):
        for _ in client.messages.create(**asked(stream=True, max_tokens=3500, extra_body=more)):
            pass
    server.wait_idle()


def test_the_key_of_anthropics_clients_is_a_key() -> None:
    assert Claude(PLAIN, "Yes.", api_key="k").create().content[0].text == "Yes."
    with pytest.raises(anthropic.AuthenticationError) as caught:
        Claude(PLAIN, api_key="other").create()
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"
    ask = json.dumps(asked()).encode()
    for headers, status in (
        ({"x-api-key": "k"}, 200),
        ({"Authorization": "Bearer k"}, 200),
        ({"Authorization": "Bearer wrong", "x-api-key": "k"}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ):
        answer = Scripted(PLAIN, "Yes.", api_key="k").post("/v1/messages", ask, **headers)
        assert answer.status_code == status, headers


def test_models_have_what_anthropics_client_reads() -> None:
    async def models(client: anthropic.AsyncAnthropic) -> Any:
        return [model async for model in client.models.list()]

    (model,) = Claude(PLAIN).use(models)
    assert (model.id, model.type, model.display_name) == ("bundled", "model", "bundled")
    assert model.created_at.year >= 2026


def test_llama_writes_one_call_per_message() -> None:
    """Templates with another style get arguments as they take them."""
    scripted = Claude(LLAMA3, "Yes.")
    turns = [*ASK, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
    scripted.create(messages=turns, tools=TOOLS)
    assert '{"name": "now", "parameters": {}}' in scripted.engine.prompts[0]


def test_messages_equal_the_engine(server: LiveServer, llm: LLM) -> None:
    want = llm.chat(
        [{"role": "user", "content": QUESTION}], {"sampling_seed": 1, "max_new_tokens": 200}
    )
    body: Any = asked(messages=[{"role": "user", "content": QUESTION}], max_tokens=200)
    body["extra_body"] = {"seed": 1}
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            text = "".join(stream.text_stream)
            built = stream.get_final_message()
        stop = want.text[20:24]
        stopped = client.messages.create(**body, stop_sequences=[stop])
        counted = client.messages.count_tokens(model="bundled", messages=body["messages"])
    (block,) = whole.content
    assert block.type == "text" and block.text == text == want.text
    assert shape(built) == shape(whole) and built.stop_reason == whole.stop_reason
    for usage in (whole.usage, built.usage):
        cached = usage.cache_read_input_tokens
        assert cached is not None
        assert usage.input_tokens + cached == len(want.prompt_token_ids) == counted.input_tokens
        assert usage.output_tokens == len(want.output_ids)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert shape(stopped) == [("text", want.text[: want.text.index(stop)])]
    server.wait_idle()


@pytest.mark.exhaustive
def test_a_forced_tool_of_the_bundled_pair(server: LiveServer) -> None:
    pytest.importorskip("xgrammar")
    schema: Any = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools: Any = [{"name": "weather", "input_schema": schema}]
    body: Any = asked(tools=tools, tool_choice={"type": "tool", "name": "weather"}, max_tokens=300)
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        whole = client.messages.create(**body, extra_body={"seed": 3})
        with client.messages.stream(**body, extra_body={"seed": 3}) as stream:
            built = stream.get_final_message()
    assert shape(built) == shape(whole)
    ((kind, name, given_),) = shape(whole)
    assert (kind, name, whole.stop_reason) == ("tool_use", "weather", "tool_use")
    assert given_["city"] in ("Paris", "Rome") and given_["days"] in (1, 2, 3)
    server.wait_idle()


@pytest.mark.exhaustive
def test_an_answer_that_fills_the_context() -> None:
    with (
        LiveServer(*flags(device="cpu", dtype="float32", context_length=64)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none") as client,
    ):
        ask: Any = asked(max_tokens=32000, messages=[{"role": "user", "content": "def f(x):"}])
        with client.messages.stream(**ask, extra_body={"ignore_eos": True}) as stream:
            message = stream.get_final_message()
        assert message.stop_reason == "model_context_window_exceeded"
