"""Tools and reasoning over HTTP: the `openai` client, real templates, a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from forerun.core.errors import ConfigError
from forerun.server.openai.output_format import CallStyle, OutputFormat, choose_format
from forerun.server.parsers.hermes import HermesParser
from forerun.server.settings import ServerSettings
from tests.server import templates
from tests.server.scripted import Scripted, tokenizer

ASK: Any = [{"role": "user", "content": "Is it warm in Zürich?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "now", "strict": True}},
]
CITY = '{"city": "Zürich {}\\n"}'
THINK = "<think>\nThe user asks.\n</think>\n\n"
HERMES = (
    f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>'
)
LLAMA = f'{{"name": "weather", "parameters": {CITY}}}'
TAGGED = f"<|python_tag|>{LLAMA}; {LLAMA}"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{CITY}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{CITY}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
WEATHER, NOW = ("weather", CITY), ("now", "{}")
THINK_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
QWEN3 = tokenizer(templates.QWEN3, THINK_TOKENS)
LLAMA3 = tokenizer(templates.LLAMA3, special=["<|python_tag|>"])
SPELLED = tokenizer(templates.QWEN3)  # its tags are several tokens
R1 = tokenizer(templates.DEEPSEEK_R1, ("<think>", "</think>"))
V31_TOKENIZER = tokenizer(templates.DEEPSEEK_V31)
PLAIN = tokenizer(templates.PLAIN)

# (tokenizer, output, content, reasoning, calls)
Case = tuple[Any, str, str | None, str | None, list[tuple[str, str]]]
CASES: list[Case] = [
    (QWEN3, HERMES, "I look.", None, [WEATHER, NOW]),
    (QWEN3, THINK + HERMES, "I look.", "The user asks.", [WEATHER, NOW]),
    (QWEN3, THINK + "Yes.\n", "Yes.\n", "The user asks.", []),
    (QWEN3, "Yes.", "Yes.", None, []),
    (QWEN3, "<think>\nThe user", None, "The user", []),
    (
        QWEN3,
        '<tool_call>{"name": "rain", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rain", "arguments": {}}</tool_call>',
        None,
        [],
    ),
    (LLAMA3, LLAMA, None, None, [WEATHER]),
    (LLAMA3, TAGGED, None, None, [WEATHER, WEATHER]),
    (LLAMA3, '{"warm": true}', '{"warm": true}', None, []),
    (R1, f"The user asks.\n</think>\n\n{DEEPSEEK}", None, "The user asks.", [WEATHER]),
    (V31_TOKENIZER, V31, None, None, [WEATHER]),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_chat(case: Case) -> None:
    made, script, content, reasoning, calls = case
    answer = Scripted(made, script).chat(messages=ASK, tools=TOOLS)
    (choice,) = answer.choices
    message = choice.message
    assert message.content == content
    found = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
    assert found == calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert all(call.id and call.type == "function" for call in message.tool_calls or [])
    assert (message.model_extra or {}).get("reasoning_content") == reasoning
    assert (message.model_extra or {}).get("reasoning") == reasoning


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_chat_streams(case: Case, step: int) -> None:
    made, script, content, reasoning, calls = case
    scripted = Scripted(made, script, step=step)
    chunks = scripted.chat(messages=ASK, tools=TOOLS, stream=True)
    text = thought = ""
    names: list[str] = []
    arguments: list[str] = []
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        thought += (delta.model_extra or {}).get("reasoning_content") or ""
        for call in delta.tool_calls or []:
            if call.function.name is not None:
                assert call.index == len(names)
                assert call.id
                names.append(call.function.name)
                arguments.append("")
            arguments[call.index] += call.function.arguments
    assert text == (content or "")
    assert thought == (reasoning or "")
    assert list(zip(names, arguments, strict=True)) == calls
    assert chunks[-1].choices[0].finish_reason == ("tool_calls" if calls else "stop")


def test_arguments_are_streamed_as_they_come() -> None:
    chunks = Scripted(QWEN3, HERMES).chat(messages=ASK, tools=TOOLS, stream=True)
    pieces = [
        call.function.arguments
        for chunk in chunks
        for call in chunk.choices[0].delta.tool_calls or []
        if call.index == 0
    ]
    assert len(pieces) > len(CITY) // 2  # about one per character


def test_a_call_that_max_tokens_cuts_off_is_the_same_in_a_stream() -> None:
    script = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
    most = {"messages": ASK, "tools": TOOLS, "max_tokens": 55}
    whole = Scripted(QWEN3, script).chat(**most).choices[0]
    assert whole.finish_reason == "length" and not whole.message.content
    (call,) = whole.message.tool_calls
    cut = call.function.arguments
    assert call.function.name == "weather" and CITY.startswith(cut) and 0 < len(cut) < len(CITY)
    chunks = Scripted(QWEN3, script).chat(**most, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert not any(delta.content for delta in deltas)
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    assert "".join(piece.function.arguments for piece in pieces) == cut
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_call_whose_name_is_cut_off_is_text() -> None:
    script = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    answer = Scripted(QWEN3, script).chat(messages=ASK, tools=TOOLS, max_tokens=10).choices[0]
    assert answer.message.tool_calls is None
    assert script.startswith(answer.message.content) and "weather" not in answer.message.content


def test_samples_have_parsers_of_their_own() -> None:
    answer = Scripted(QWEN3, HERMES, "Yes.", THINK + "No.").chat(messages=ASK, tools=TOOLS, n=3)
    assert [c.finish_reason for c in answer.choices] == ["tool_calls", "stop", "stop"]
    assert [c.message.content for c in answer.choices] == ["I look.", "Yes.", "No."]
    chunks = Scripted(QWEN3, HERMES, "Yes.", step=4).chat(
        messages=ASK, tools=TOOLS, n=2, stream=True
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["I look.", "Yes."]


def test_one_call_at_most() -> None:
    for stream in (False, True):
        scripted = Scripted(QWEN3, HERMES)
        got = scripted.chat(messages=ASK, tools=TOOLS, parallel_tool_calls=False, stream=stream)
        messages = [c.choices[0].delta for c in got] if stream else [got.choices[0].message]
        calls = [call for message in messages for call in message.tool_calls or []]
        assert {call.function.name for call in calls} <= {"weather", None}
        assert "".join(call.function.arguments for call in calls) == CITY


def test_no_tools_no_calls() -> None:
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        scripted = Scripted(QWEN3, HERMES)
        answer = scripted.chat(messages=ASK, **body)
        assert answer.choices[0].message.content == HERMES
        assert answer.choices[0].finish_reason == "stop"
        assert "[tools" not in scripted.engine.prompts[0]


def test_definitions_and_earlier_calls_reach_the_template() -> None:
    """What an answer holds can be sent back as it is."""
    first = Scripted(QWEN3, THINK + HERMES).chat(messages=ASK, tools=TOOLS).choices[0].message
    turn = [first.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "20 °C"}]
    scripted = Scripted(QWEN3, "Yes.")
    scripted.chat(messages=[*ASK, *turn], tools=TOOLS)
    prompt = scripted.engine.prompts[0]
    definitions = json.loads(prompt.partition("[tools ")[2].partition("]<user>")[0])
    assert definitions == [TOOLS[0], {"type": "function", "function": {"name": "now"}}]
    written = HERMES.replace('"now"}', '"now", "arguments": {}}')
    assert f"<think>The user asks.</think>{written}" in prompt
    assert "<tool>20 °C<|im_end|>" in prompt

    scripted = Scripted(R1, "x</think>Yes.")
    scripted.chat(messages=[*ASK, *turn[1:], {**turn[0], "content": ""}, turn[1]], tools=TOOLS)
    assert DEEPSEEK.removesuffix("<｜tool▁calls▁end｜>") in scripted.engine.prompts[0]

    scripted = Scripted(LLAMA3, "Yes.")
    scripted.chat(messages=[*ASK, *turn], tools=TOOLS)
    assert json.loads(CITY)["city"].replace("\n", "\\n") in scripted.engine.prompts[0]


DEPTHS = (100, 300, 600, 900)
ASKED = '[{"role": "user", "content": "x"}]'
CALL = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": "[]"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "'function'"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "defined twice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "The name of a function"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]}, "parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]},
        "at most 128",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 2**21}}]},
        "characters as JSON",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nov"}}},
        "Did you mean 'now'",
    ),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice must be"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice must be"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "the text of a JSON object"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "A tool call must be"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "must be a list"),
    ({"extra_body": {"stream_reasoning": False}}, "stream_reasoning"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=range(len(REFUSED)))
def test_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        Scripted(QWEN3).chat(**{"messages": ASK, **body})
    assert words in str(caught.value)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    "value", ['"\\ud800"', "1" + "0" * 400, *("[" * n + "]" * n for n in DEPTHS)]
)
def test_values_that_json_should_not_have(path: str, value: str) -> None:
    """Refused, or given to the template."""
    function = f'"name": "now", "parameters": {{"default": {value}}}'
    tool = f'"function": {{{function}}}' if "chat" in path else function
    asked = f'"messages": {ASKED}' if "chat" in path else f'"input": {ASKED}'
    body = f'{{{asked}, "tools": [{{"type": "function", {tool}}}]}}'
    response = Scripted(QWEN3, "Yes.").post(path, body.encode())
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]


def test_a_model_that_knows_no_tools_says_so() -> None:
    with pytest.raises(openai.BadRequestError, match=r"is none \(the chat template"):
        Scripted(PLAIN).chat(messages=ASK, tools=TOOLS)
    got = Scripted(PLAIN, HERMES, tool_call_parser="qwen").chat(messages=ASK, tools=TOOLS)
    assert len(got.choices[0].message.tool_calls) == 2
    with pytest.raises(openai.BadRequestError, match="as set"):
        Scripted(QWEN3, tool_call_parser="none").chat(messages=ASK, tools=TOOLS)


def test_reasoning_can_be_left_where_it_is_or_out() -> None:
    for field, content, reasoning in (
        ({"separate_reasoning": False}, THINK + "Yes.", None),
        ({"include_reasoning": False}, "Yes.", None),
        ({}, "Yes.", "The user asks."),
    ):
        for stream in (False, True):
            scripted = Scripted(QWEN3, THINK + "Yes.")
            got = scripted.chat(messages=ASK, stream=stream, extra_body=field)
            messages = [c.choices[0].delta for c in got] if stream else [got.choices[0].message]
            assert "".join(message.content or "" for message in messages) == content
            thoughts = [(m.model_extra or {}).get("reasoning_content") for m in messages]
            assert "".join(filter(None, thoughts)) == (reasoning or "")
    answer = Scripted(QWEN3, THINK + "Yes.", reasoning_parser="none").chat(messages=ASK)
    assert answer.choices[0].message.content == THINK + "Yes."


def test_thinking_can_be_switched_off() -> None:
    """The prompt says so, and what looks like reasoning then is text."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    scripted = Scripted(QWEN3, "<think>no</think>")
    answer = scripted.chat(messages=ASK, extra_body=off)
    assert scripted.engine.prompts[0].endswith("<think>\n\n</think>\n\n")
    assert answer.choices[0].message.content == "<think>no</think>"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_tokens_are_counted() -> None:
    answer = Scripted(QWEN3, THINK + "Yes.").chat(messages=ASK)
    reasoning = len("\nThe user asks.\n") + 2
    assert answer.usage.completion_tokens_details.reasoning_tokens == reasoning
    assert answer.usage.completion_tokens == reasoning + len("\n\nYes.") + 1
    answer = Scripted(R1, "endless").chat(messages=ASK)
    assert answer.choices[0].message.content is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("endless") + 1


@pytest.mark.parametrize("made", [QWEN3, SPELLED], ids=["tokens", "spelled"])
@pytest.mark.parametrize("step", [1, 1000])
def test_reasoning_tokens_where_the_tags_are_several_tokens(made: Any, step: int) -> None:
    text = " \n" + THINK.rstrip()
    count = len(made(text)["input_ids"])
    for script, most, reasoning in (
        (text + "\n\nYes. </think>", None, count),
        (text + "\n\nYes. </think>", count - 1, count - 1),  # ends within the reasoning
        ("Yes. " + text, None, 0),
        ("<thin", None, 0),
        ("<think>endless", None, len(made("<think>endless")["input_ids"]) + 1),
    ):
        body = {"messages": ASK, "max_tokens": most}
        whole = Scripted(made, script, step=step).chat(**body)
        assert whole.usage.completion_tokens_details.reasoning_tokens == reasoning
        each = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = Scripted(made, script, step=step).chat(**body, **each)
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == reasoning


def test_tokenize_takes_what_chat_takes() -> None:
    """The same conversion: null content, arguments as text, reasoning, tools."""
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": ""}}
    turn = {"role": "assistant", "content": None, "tool_calls": [called], "reasoning": "hm"}
    body: dict[str, Any] = {
        "messages": [*ASK, turn, {"role": "tool", "tool_call_id": "c1", "content": "5"}, *ASK],
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": TOOLS,
    }
    for made in (QWEN3, LLAMA3, R1):
        for some in (body, {**body, "tool_choice": "none"}, {"messages": body["messages"]}):
            chat = Scripted(made, "Yes.").chat(
                messages=some["messages"],
                tools=some.get("tools", openai.omit),
                tool_choice=some.get("tool_choice", openai.omit),
                extra_body={
                    "return_token_ids": True,
                    "chat_template_kwargs": some.get("chat_template_kwargs", {}),
                },
            )
            got = Scripted(made).post("/tokenize", json.dumps(some).encode())
            assert got.status_code == 200, got.text
            assert got.json()["tokens"] == chat.prompt_token_ids
    broken = {**turn, "tool_calls": [{**called, "function": {"name": "now", "arguments": "x"}}]}
    refused = Scripted(QWEN3).post("/tokenize", json.dumps({"messages": [broken]}).encode())
    assert refused.status_code == 400 and "JSON object" in refused.json()["error"]["message"]


def test_a_template_that_fails_is_a_400_of_one_line() -> None:
    made = tokenizer("{% if messages|length > 1 %}{{ 1 // 0 }}{% endif %}x")
    with pytest.raises(openai.BadRequestError, match=r"ZeroDivisionError.*line 1") as caught:
        Scripted(made).chat(messages=[*ASK, *ASK])
    assert "\n" not in caught.value.message


def test_token_ids_and_special_tokens() -> None:
    """The end's token is not in the text, though the parser needs special tokens in it."""
    answer = Scripted(LLAMA3, "Yes <|python_tag|>").chat(
        messages=ASK, tools=TOOLS, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].message.content == "Yes <|python_tag|>"
    assert len(answer.choices[0].token_ids) == len("Yes ") + 2
    plain = Scripted(LLAMA3, "Yes <|python_tag|>").chat(messages=ASK)
    assert plain.choices[0].message.content == "Yes "


FORMATS: list[tuple[Any, str, str]] = [
    (QWEN3, "hermes (the chat template writes <tool_call>)", "qwen3 ("),
    (LLAMA3, "llama3 (", "none ("),
    (R1, "deepseekv3 (", "deepseek-r1 (prompts end with <think>)"),
    (V31_TOKENIZER, "deepseekv31 (", "qwen3 ("),
    (PLAIN, "none (the chat template takes no calls)", "none ("),
    (tokenizer(templates.UNKNOWN), "none (the chat template writes calls in a format", "none ("),
    (None, "none (no tokenizer)", "none (no tokenizer)"),
]


@pytest.mark.parametrize(("made", "tools", "reasoning"), FORMATS, ids=range(len(FORMATS)))
def test_formats_are_chosen_by_the_template(made: Any, tools: str, reasoning: str) -> None:
    explain = dict(choose_format("auto", "auto", made).explain)
    assert explain["tools"].startswith(tools)
    assert explain["reasoning"].startswith(reasoning)


@pytest.mark.parametrize(("choice", "content"), [("required", None), ("auto", "<tool")])
def test_a_marker_that_is_cut_off(choice: Any, content: str | None) -> None:
    """Where an answer consists of calls it is no text of it."""
    calls = HERMES[HERMES.index("<tool_call>") :]
    scripted = Scripted(QWEN3, f"{calls}<tool")
    message = scripted.chat(messages=ASK, tools=TOOLS, tool_choice=choice).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
    assert message.content == content


def test_a_template_that_leaves_tools_out_is_named() -> None:
    said = dict(choose_format("hermes", "auto", PLAIN).explain)["tools"]
    assert said == "hermes (as set, but the chat template leaves tools out of prompts)"
    assert dict(choose_format("hermes", "auto", QWEN3).explain)["tools"] == "hermes (as set)"


def test_a_template_of_its_own_for_tools() -> None:
    made = tokenizer(templates.QWEN3, THINK_TOKENS)
    made.chat_template = {"default": templates.PLAIN, "tool_use": templates.QWEN3}
    assert choose_format("auto", "auto", made).tools is HermesParser
    scripted = Scripted(made, HERMES)
    assert len(scripted.chat(messages=ASK, tools=TOOLS).choices[0].message.tool_calls) == 2
    assert scripted.engine.prompts[0].startswith("[tools ")


def test_styles_of_calls() -> None:
    assert choose_format("auto", "auto", QWEN3).style == CallStyle(True, "")
    assert choose_format("auto", "auto", LLAMA3).style == CallStyle(False, None)
    assert choose_format("auto", "auto", R1).style == CallStyle(True, None)
    # It writes whatever the content is: null would be "None".
    careless = tokenizer(templates.UNKNOWN.replace("tojson", "string"))
    assert choose_format("auto", "auto", careless).style == CallStyle(True, "")
    assert choose_format("auto", "auto", LLAMA3).special
    assert not choose_format("auto", "auto", QWEN3).special
    assert choose_format("qwen", "none", R1).tools is HermesParser


def test_names_of_parsers_are_checked() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        ServerSettings(tool_call_parser="hermess")
    with pytest.raises(ConfigError, match="reasoning_parser must be one of auto, none"):
        ServerSettings(reasoning_parser="x")


def test_prompts_show_whether_outputs_begin_in_reasoning() -> None:
    r1, qwen3 = OutputFormat(reasoning="deepseek-r1"), OutputFormat(reasoning="qwen3")
    for tail, want in (
        ("<think>\n", (True, True)),
        ("</think>\n\n", (None, None)),
        ("x", (True, False)),
    ):
        assert (r1.begins_in_reasoning(tail), qwen3.begins_in_reasoning(tail)) == want
    assert OutputFormat().begins_in_reasoning("<think>") is None
