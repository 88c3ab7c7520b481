"""Tool calls that are enforced: whatever the grammar allows is read back as valid calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

pytest.importorskip("xgrammar")

from forerun.core.errors import RequestError
from forerun.grammar.vocabulary import import_xgrammar
from tests.covering import some_of
from tests.server import templates
from tests.server.scripted import Scripted, tokenizer
from tests.server.support import LiveServer
from tests.server.test_tools import ASK, LLAMA3, QWEN3, R1, V31_TOKENIZER
from tests.server.walking import Walking

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5},
        "days": {"type": "array", "items": {"enum": [1, 2, "all"]}, "maxItems": 3},
        "unit": {"anyOf": [{"const": "C"}, {"type": "null"}]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FREE = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 3, "maximum": 40}}}
SCHEMAS: dict[str, Any] = {"weather": CITY, "a.b:c": FREE, "now": {"type": "object"}}


def function(name: str, strict: bool | None = None) -> Any:
    parameters = {} if name == "now" else {"parameters": SCHEMAS[name]}
    return {"type": "function", "function": {"name": name, **parameters, "strict": strict}}


TOOLS = [function(name) for name in SCHEMAS]
STRICT = [function(name, strict=True) for name in SCHEMAS]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SPECIAL = tokenizer(
    templates.DEEPSEEK_V31,
    special=["<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|im_start|>"],
)
MODELS = {"qwen": QWEN3, "llama": LLAMA3, "r1": R1, "v3.1": V31_TOKENIZER, "special": SPECIAL}
# Their grammars differ most; `test_required` runs all.
SOME_MODELS = some_of([(name,) for name in MODELS], 0, 4)
JSON_ANSWER = {"type": "json_schema", "json_schema": {"name": "x", "schema": FREE}}

Calls = list[tuple[str, str]]


def message(got: Any, stream: bool) -> tuple[str, Calls, str]:
    """Content, calls, finish reason."""
    if not stream:
        (choice,) = got.choices
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason
    text, streamed = "", []
    for chunk in got:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            if call.function.name is not None:
                streamed.append([call.function.name, ""])
            streamed[call.index][1] += call.function.arguments
    return text, [(name, text) for name, text in streamed], got[-1].choices[0].finish_reason


def check(calls: Calls) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.covering(0)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_required(tmp_path: Path, model: str, stream: bool) -> None:
    counts = set()
    for seed in range(3):
        for parallel in (True, False):
            walking = Walking(MODELS[model], tmp_path, seed)
            got = walking.chat(
                messages=ASK,
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=parallel,
                stream=stream,
            )
            content, calls, finish = message(got, stream)
            assert (content, finish) == ("", "tool_calls")
            assert 1 <= len(calls) <= (9 if parallel else 1)
            check(calls)
            counts.add(len(calls))
    assert max(counts) > 1


@pytest.mark.parametrize("model", SOME_MODELS)
def test_a_function_by_name(tmp_path: Path, model: str) -> None:
    for seed in range(2):
        walking = Walking(MODELS[model], tmp_path, seed)
        got = walking.chat(messages=ASK, tools=TOOLS, tool_choice=NAMED)
        content, calls, finish = message(got, stream=False)
        assert (content, finish, [name for name, _ in calls]) == ("", "tool_calls", ["weather"])
        check(calls)


DEEPSEEK = "Hi <｜tool▁calls▁begin｜>"
BEGINNINGS = {
    "qwen": ("Hi <tool_call>", "<tool_call>", "Hi ", "<think>a</think>Hi <tool_call>"),
    "llama": ("Hi <|python_tag|>", "<|python_tag|>", "{", "Hi {", ""),
    "r1": (f"a</think>{DEEPSEEK}", "<think>a</think>Hi", "a x</think>"),
    "v3.1": (DEEPSEEK, "", "Hi"),
    "special": (DEEPSEEK, "", "Hi"),
}


@pytest.mark.parametrize("model", SOME_MODELS)
def test_strict_functions_validate_wherever_they_are_called(tmp_path: Path, model: str) -> None:
    found = texts = 0
    for seed in range(2):
        for begin in BEGINNINGS[model]:
            got = Walking(MODELS[model], tmp_path, seed, begin).chat(messages=ASK, tools=STRICT)
            content, calls, finish = message(got, stream=False)
            check(calls)
            assert finish == ("tool_calls" if calls else "stop")
            found, texts = found + bool(calls), texts + bool(content)
    assert found >= 2 and texts >= 2


@pytest.mark.covering(0)
@pytest.mark.parametrize("model", SOME_MODELS)
def test_an_answer_in_json_or_calls(tmp_path: Path, model: str) -> None:
    answers = called = 0
    for seed in range(12):
        walking = Walking(MODELS[model], tmp_path, seed)
        got = walking.chat(messages=ASK, tools=STRICT[:1], response_format=JSON_ANSWER)
        content, calls, _ = message(got, stream=False)
        check(calls)
        assert bool(content) != bool(calls)
        if content:
            jsonschema.validate(json.loads(content), FREE)
        answers, called = answers + bool(content), called + bool(calls)
    assert answers and called


def test_reasoning_comes_before_what_is_enforced(tmp_path: Path) -> None:
    thoughts = 0
    for seed in range(4):
        for made, body in ((R1, {}), (QWEN3, {}), (R1, {"tools": TOOLS, "tool_choice": NAMED})):
            walking = Walking(made, tmp_path, seed)
            got = walking.chat(messages=ASK, response_format=JSON_ANSWER, **body)
            said = got.choices[0].message
            if body:
                check(message(got, stream=False)[1])
            else:
                jsonschema.validate(json.loads(said.content), FREE)
            thought = said.model_extra["reasoning_content"]
            assert "</think>" in walking.engine.walked[0] or made is QWEN3
            thoughts += bool(thought)
    assert thoughts > 4
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    walking = Walking(QWEN3, tmp_path, 0)
    walking.chat(messages=ASK, tools=TOOLS, tool_choice="required", extra_body=off)
    assert walking.engine.walked[0].startswith("<tool_call>")


def test_nothing_is_enforced_unasked() -> None:
    lax = [function("weather", strict=False), function("now")]
    for body in ({"tools": lax}, {"tools": STRICT, "tool_choice": "none"}, {}):
        scripted = Scripted(QWEN3, "Yes.")
        scripted.chat(messages=ASK, **body)
        assert scripted.engine.grammars == []


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Zürich"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
LIVE: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": WEATHER, "strict": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "choice", ["required", pytest.param(NAMED, marks=pytest.mark.exhaustive)], ids=str
)
def test_the_bundled_model_calls_functions(server: LiveServer, choice: Any) -> None:
    """Its template shows no functions: what it writes comes from the grammar alone."""
    call: Any = {"model": "bundled", "messages": ASK, "tools": [LIVE], "tool_choice": choice}
    call |= {"parallel_tool_calls": False, "max_tokens": 150}
    client = server.client()
    for seed in range(2):
        content, calls, finish = message(client.chat.completions.create(**call, seed=seed), False)
        assert (content, finish, len(calls)) == ("", "tool_calls", 1)
        jsonschema.validate(json.loads(calls[0][1]), WEATHER)
        chunks = list(client.chat.completions.create(**call, seed=seed, stream=True))
        assert message(chunks, True) == (content, calls, finish)
        plain = client.chat.completions.create(**call, seed=seed, extra_body={"speculative": False})
        assert message(plain, False) == (content, calls, finish)
        deltas = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
        assert len(deltas) > 2  # arguments come in pieces


@pytest.mark.exhaustive
def test_the_bundled_model_calls_functions_in_responses(server: LiveServer) -> None:
    tool = {"type": "function", **LIVE["function"]}
    call: Any = {"model": "bundled", "input": "x", "tools": [tool], "tool_choice": "required"}
    call |= {"parallel_tool_calls": False, "max_output_tokens": 150, "extra_body": {"seed": 1}}
    client = server.client()
    (item,) = client.responses.create(**call).output
    jsonschema.validate(json.loads(item.arguments), WEATHER)  # type: ignore[union-attr]
    events = list(client.responses.create(**call, stream=True))
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert done.arguments == item.arguments  # type: ignore[union-attr]
    with client.responses.stream(**call) as stream:
        (final,) = stream.get_final_response().output
        assert final.parsed_arguments == json.loads(item.arguments)  # type: ignore[union-attr]


@pytest.mark.exhaustive
def test_the_clients_parse_helper_takes_models(server: LiveServer) -> None:
    class Weather(pydantic.BaseModel):
        city: Literal["Paris", "Zürich"]
        days: int = pydantic.Field(le=99, ge=0)

    client = server.client()
    tool: Any = openai.pydantic_function_tool(Weather, name="weather")
    got = client.chat.completions.parse(
        model="bundled", messages=ASK, tools=[tool], tool_choice=NAMED, max_tokens=150, seed=5
    )
    (call,) = got.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    answer = (
        client.chat.completions.parse(
            model="bundled", messages=ASK, response_format=Weather, max_tokens=150, seed=5
        )
        .choices[0]
        .message
    )
    assert isinstance(answer.parsed, Weather)
    parsed = client.responses.parse(
        model="bundled",
        input="x",
        text_format=Weather,
        max_output_tokens=150,
        extra_body={"seed": 5},
    )
    assert isinstance(parsed.output_parsed, Weather)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"not": {}}, "function 'f' cannot be enforced: json_schema at #: not"),
    ({"type": "array"}, "must have the type 'object', got 'array'"),
    ({"properties": {"a": {"uniqueItems": True}}}, "json_schema at #/properties/a: uniqueItems"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, "type beside $ref"),
    ({"description": "x" * 150_000}, "Give fewer tools"),
]


@pytest.mark.parametrize(("parameters", "words"), REFUSED, ids=range(len(REFUSED)))
def test_parameters_that_cannot_be_enforced(parameters: dict[str, Any], words: str) -> None:
    made = {"name": "f", "parameters": parameters}
    for body in (
        {"tools": [{"type": "function", "function": made}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": {**made, "strict": True}}]},
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            Scripted(QWEN3).chat(messages=ASK, **body)
        assert words in str(caught.value)


def test_deep_parameters_are_refused() -> None:
    deep = json.loads('{"items":' * 100 + "1" + "}" * 100)
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(openai.BadRequestError, match="function 'f' has 100 levels"):
        Scripted(QWEN3).chat(messages=ASK, tools=[tool], tool_choice="required")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match="tool calls that are enforced"):
        import_xgrammar()
    with pytest.raises(openai.BadRequestError, match=r"pip install 'forerun\[grammar\]'"):
        Walking(QWEN3, tmp_path, 0).chat(messages=ASK, tools=TOOLS, tool_choice="required")
