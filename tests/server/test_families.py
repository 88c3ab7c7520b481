"""Every family's round trip: tools → prompt → raw answer → calls and reasoning → prompt again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from forerun.server.openai.output_format import choose_format
from forerun.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from tests.covering import some_of
from tests.server import family_templates as written
from tests.server.scripted import Scripted, tokenizer
from tests.server.walking import Walking

ASK: Any = [{"role": "user", "content": "Is it warm in Zürich?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hourly": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def function(name: str, schema: Any, strict: bool | None = None) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


TOOLS = [function("weather", WEATHER), function("now", NOTHING)]
STRICT = [function("weather", WEATHER, strict=True), function("now", NOTHING, strict=True)]
CITY = {"city": 'Zürich "{\\n}"', "days": 3}
CALLS = [("weather", CITY), ("now", {})]


@dataclass(frozen=True)
class Family:
    """What is published of one."""

    template: str
    tools: str  # the parsers that the template calls for
    reasoning: str
    thought: str  # how an answer begins; "" without reasoning
    calls: str  # the two calls
    special: tuple[str, ...] = ()
    again: str | None = None  # the calls in the prompt, where they are written otherwise there
    single: bool = False  # one call an answer

    @property
    def tokenizer(self) -> Any:
        return tokenizer(self.template, special=self.special)

    @property
    def with_marks(self) -> Any:
        """A tokenizer whose tokens end what has no end otherwise."""
        marks = [mark for mark in _ENDS if mark not in self.special]
        return tokenizer(self.template, marks, self.special)


_ENDS = ("</think>", "</parameter>", "</arg_value>", "Here is my response:")
_JSON = json.dumps(CITY, ensure_ascii=False)
_CHANNELS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>")
FAMILIES = {
    "gpt-oss": Family(
        written.GPT_OSS,
        "gpt-oss",
        "gpt-oss",
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant",
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_JSON}",
        _CHANNELS,
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        f"{_JSON}<|call|>",
        single=True,
    ),
    "qwen3-coder": Family(
        written.QWEN3_CODER,
        "qwen3_coder",
        "deepseek-r1",
        "The user asks.\n</think>\n\n",
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY['city']}\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "glm-4.5": Family(
        written.GLM45,
        "glm45",
        "qwen3",
        "<think>The user asks.</think>\n",
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY['city']}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>",
    ),
    "glm-4.7": Family(
        written.GLM47,
        "glm45",
        "deepseek-r1",
        "The user asks.</think>",
        f"<tool_call>weather<arg_key>city</arg_key><arg_value>{CITY['city']}</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
    ),
    "kimi-k2": Family(
        written.KIMI_K2,
        "kimi_k2",
        "qwen3",
        "<think>The user asks.</think>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "gemma-4": Family(
        written.GEMMA4,
        "gemma4",
        "gemma4",
        "<|channel>thought\nThe user asks.<channel|>",
        f'<|tool_call>call:weather{{city:<|"|>{CITY["city"]}<|"|>,days:3}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    "mistral": Family(
        written.MISTRAL,
        "mistral",
        "mistral",
        "[THINK]The user asks.[/THINK]",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {_JSON}}}, '
        '{"name": "now", "arguments": {}}]',
        ("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {_JSON}, "id": "000000000"}}, '
        '{"name": "now", "arguments": {}, "id": "000000001"}]',
    ),
    "mistral-args": Family(
        written.MISTRAL_ARGS,
        "mistral",
        "mistral",
        "[THINK]The user asks.[/THINK]",
        f"[TOOL_CALLS]weather[ARGS]{_JSON}[TOOL_CALLS]now[ARGS]{{}}",
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    ),
    "minimax-m2": Family(
        written.MINIMAX_M2,
        "minimax-m2",
        "deepseek-r1",
        "The user asks.\n</think>\n\n",
        '<minimax:tool_call>\n<invoke name="weather">\n'
        f'<parameter name="city">{CITY["city"]}</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    "llama-4": Family(
        written.LLAMA4,
        "pythonic",
        "none",
        "",
        f"[weather(city={json.dumps(CITY['city'], ensure_ascii=False)}, days=3), now()]",
    ),
    "granite": Family(
        written.GRANITE,
        "granite",
        "granite",
        "Here is my thought process: The user asks. Here is my response: ",
        f'<|tool_call|>[{{"name": "weather", "arguments": {_JSON}}}, '
        '{"name": "now", "arguments": {}}]',
        ("<|tool_call|>",),
    ),
    "olmo-3": Family(
        written.OLMO3,
        "olmo3",
        "deepseek-r1",
        "The user asks.</think>",
        f"<function_calls>weather(city={json.dumps(CITY['city'], ensure_ascii=False)}, days=3)\n"
        "now()</function_calls>",
    ),
}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def parsed(got: Any, stream: bool) -> tuple[str, str, list[tuple[str, Any]], str]:
    """Content, reasoning, calls, finish reason."""
    deltas = [c.choices[0].delta for c in got] if stream else [got.choices[0].message]
    text = "".join(delta.content or "" for delta in deltas)
    thoughts = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    calls: list[list[str]] = []
    for delta in deltas:
        for call in delta.tool_calls or []:
            if call.function.name is not None:
                calls.append([call.function.name, ""])
            calls[-1][1] += call.function.arguments
    finish = got[-1].choices[0].finish_reason if stream else got.choices[0].finish_reason
    return text, "".join(thoughts), [(name, json.loads(args)) for name, args in calls], finish


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_parsers_are_chosen_by_the_template(family: Family) -> None:
    chosen = dict(choose_format("auto", "auto", family.tokenizer).explain)
    assert chosen["tools"].startswith(f"{family.tools} (")
    assert chosen["reasoning"].startswith(f"{family.reasoning} (")


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [1, 5, 10_000])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_answer_is_parsed_whole_and_streamed(family: Family, step: int) -> None:
    thought = "The user asks." if family.thought else ""
    calls = CALLS[:1] if family.single else CALLS
    for stream in (False, True):
        scripted = Scripted(family.tokenizer, family.thought + family.calls, step=step)
        got = scripted.chat(messages=ASK, tools=TOOLS, stream=stream, extra_body=THINKING)
        assert parsed(got, stream) == ("", thought, calls, "tool_calls")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_calls_and_results_go_back_into_the_prompt(family: Family) -> None:
    made = family.tokenizer
    answer = Scripted(made, family.thought + family.calls).chat(
        messages=ASK, tools=TOOLS, extra_body=THINKING
    )
    message = answer.choices[0].message.model_dump()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "20 °C"}
        for call in message["tool_calls"]
    ]
    scripted = Scripted(made, "Yes.")
    scripted.chat(messages=[*ASK, message, *results], tools=TOOLS)
    (prompt,) = scripted.engine.prompts
    assert (family.again or family.calls) in prompt
    assert "20 °C" in prompt


def test_results_refer_to_calls_by_the_ids_of_the_prompt() -> None:
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        for at in range(2)
    ]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"call_{at}", "content": "x"} for at in (1, 0)]
    scripted = Scripted(FAMILIES["kimi-k2"].tokenizer, "Yes.")
    scripted.chat(messages=[*ASK, turn, *results], tools=TOOLS)
    (prompt,) = scripted.engine.prompts
    assert prompt.index("Return of functions.now:1") < prompt.index("Return of functions.now:0")


# --- grammars ------------------------------------------------------------------------------------


def grammar(family: Family, **body: Any) -> Any:
    scripted = Scripted(family.tokenizer, family.thought + family.calls)
    scripted.chat(messages=ASK, **body)
    return scripted.engine.grammars[0].text


def accepts(tag: str, text: str) -> bool:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    accepted: bool = _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(tag), text)
    return accepted


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_grammars_accept_what_models_write_and_no_other_functions(family: Family) -> None:
    pytest.importorskip("xgrammar")
    raw = family.thought + family.calls
    for body in ({"tools": TOOLS, "tool_choice": "required"}, {"tools": STRICT}):
        tag = grammar(family, extra_body=THINKING, **body)
        assert accepts(tag, raw)
        assert not accepts(tag, raw.replace("weather", "rain"))
        assert not accepts(tag, raw.replace("days", "nights"))
        if family.reasoning == "qwen3":
            assert accepts(tag, f"\n{raw}")
        assert accepts(tag, family.thought + "Yes.") == ("tool_choice" not in body)
    named = {"type": "function", "function": {"name": "now"}}
    tag = grammar(family, tools=TOOLS, tool_choice=named, extra_body=THINKING)
    assert not accepts(tag, raw)


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_strict_functions_are_not_called_in_ways_that_parsers_merely_tolerate(
    family: Family,
) -> None:
    pytest.importorskip("xgrammar")
    tag = grammar(family, tools=STRICT, extra_body=THINKING)
    assert accepts(tag, f"{family.thought}ok now(")
    syntax = TOOL_PARSERS[family.tools].syntax
    for opening in syntax.tolerated:
        assert not accepts(tag, f"{family.thought}ok {opening}now")
    if family.thought:  # calls at its end are read, too
        wrong = family.calls.replace("days", "nights")
        assert not accepts(tag, family.thought.replace("asks.", wrong))


@pytest.mark.covering(0)
@pytest.mark.parametrize("seed", some_of([(0,), (1,), (2,)], 0))
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_whatever_a_grammar_allows_is_read_as_valid_calls(
    tmp_path: Path, family: Family, seed: int
) -> None:
    pytest.importorskip("xgrammar")
    schemas = {"weather": WEATHER, "now": NOTHING}
    for stream in (False, True):
        walking = Walking(family.with_marks, tmp_path, seed)
        body: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": "required"}
        text, _, calls, finish = parsed(walking.chat(**body, stream=stream), stream)
        assert (text, finish) == ("", "tool_calls"), walking.engine.walked
        for name, arguments in calls:
            jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.now json<|message|>",
        "<|channel|>commentary to=functions.now code<|message|>",
        " to=functions.now<|channel|>commentary json<|message|>",
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>",
    ],
)
def test_headers_that_gpt_oss_writes(header: str) -> None:
    pytest.importorskip("xgrammar")
    family = FAMILIES["gpt-oss"]
    answer = Scripted(family.tokenizer, f"{header}{{}}").chat(messages=ASK, tools=TOOLS)
    assert parsed(answer, stream=False)[2] == [("now", {})]
    tag = grammar(family, tools=TOOLS, tool_choice="required")
    assert accepts(tag, f"{header}{{}}")
    assert accepts(tag, f"{family.thought}{header}{{}}")


def test_names_are_those_of_the_peers() -> None:
    """SGLang's and vLLM's, where both name a family."""
    for names in (
        ("gpt-oss", "openai"),
        ("minimax-m2", "minimax_m2"),
        ("pythonic", "llama4_pythonic"),
        ("qwen3_coder", "qwen3_xml"),
        ("deepseekv3", "deepseek_v3"),
    ):
        assert len({TOOL_PARSERS[name] for name in names}) == 1
    assert REASONING_PARSERS["gpt-oss"] is REASONING_PARSERS["openai_gptoss"]


FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "enum": ["x", "y"]},
        "heat": {"type": "number", "minimum": 0},
        "parts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"k": {"type": "boolean"}},
                "required": ["k"],
            },
            "minItems": 1,
        },
        "note": {"type": ["string", "null"]},
    },
    "required": ["parts"],
}
# (family, arguments, whether the grammar of `FORECAST` allows them)
LITERALS = [
    ("gemma-4", '{place:<|"|>x<|"|>,parts:[{k:true}]}', True),
    ("gemma-4", '{heat:2.5,parts:[{k:true},{k:false}],note:<|"|>a < b<|"|>}', True),
    ("gemma-4", "{parts:[{k:true}],note:null}", True),
    ("gemma-4", '{place:<|"|>z<|"|>,parts:[{k:true}]}', False),
    ("gemma-4", "{heat:-1,parts:[{k:true}]}", False),
    ("gemma-4", "{parts:[]}", False),
    ("gemma-4", "{parts:[{}]}", False),
    ("gemma-4", "{}", False),
    ("llama-4", 'place="x", parts=[{"k": true}]', True),
    ("llama-4", "place='y', parts=[{\"k\": true}], note=None", True),
    ("llama-4", "parts=[{\"k\": true}], note='it is'", True),
    ("llama-4", 'place="z", parts=[{"k": true}]', False),
    ("llama-4", 'heat=-1, parts=[{"k": true}]', False),
    ("llama-4", "parts=[]", False),
    ("llama-4", "", False),
]


@pytest.mark.parametrize(("name", "arguments", "allowed"), LITERALS, ids=range(len(LITERALS)))
def test_grammars_of_arguments_that_are_not_json(name: str, arguments: str, allowed: bool) -> None:
    pytest.importorskip("xgrammar")
    tools = [function("forecast", FORECAST)]
    tag = grammar(FAMILIES[name], tools=tools, tool_choice="required")
    before, after = ("<|tool_call>call:forecast", "<tool_call|>")
    if name == "llama-4":
        before, after = "[forecast(", ")]"
    assert accepts(tag, f"{before}{arguments}{after}") == allowed


def test_functions_of_any_arguments_take_any_in_a_grammar() -> None:
    pytest.importorskip("xgrammar")
    tools = [function("now", NOTHING, strict=True), function("put", {"type": "object"})]
    for name, call in (
        ("gemma-4", '<|tool_call>call:put{a:{b:[1,<|"|>x<|"|>,{}]},c:null}<tool_call|>'),
        ("olmo-3", '</think><function_calls>put(a={"b": [1, "x", {}]}, c=None)</function_calls>'),
    ):
        assert accepts(grammar(FAMILIES[name], tools=tools), call)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"s": {"type": "string", "minLength": 2}}, "'minLength' has no grammar"),
    ({"l": {"type": "array", "items": {}, "maxItems": 129}}, "at most 128 items"),
    ({"s": {"$ref": "#"}}, "nested too deeply"),
]


@pytest.mark.parametrize(("properties", "words"), REFUSED, ids=range(len(REFUSED)))
def test_schemas_without_a_grammar_are_a_400(properties: dict[str, Any], words: str) -> None:
    tools = [function("put", {"type": "object", "properties": properties})]
    with pytest.raises(openai.BadRequestError, match="The schema of the function 'put'") as caught:
        Scripted(FAMILIES["gemma-4"].tokenizer).chat(
            messages=ASK, tools=tools, tool_choice="required"
        )
    assert words in str(caught.value)


REFERENCES = [
    ("#/$defs/x", "'#/$defs/x' refers to nothing"),
    ("#/properties/s", "'#/properties/s' refers to itself"),
    ("#/$defs/a~1b", "'#/$defs/a~1b' has an escape"),
    ("http://x/y", "got 'http://x/y'"),
    (5, "got 5"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("reference", "words"), REFERENCES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_references_that_lead_nowhere_are_named_with_the_function(
    family: Family, reference: Any, words: str
) -> None:
    parameters = {"properties": {"s": {"$ref": reference}}, "$defs": {"a/b": {}}}
    with pytest.raises(openai.BadRequestError) as caught:
        grammar(family, tools=[function("put", parameters)], tool_choice="required")
    assert "The schema of the function 'put'" in str(caught.value)
    assert "at #/properties/s: $ref" in str(caught.value) and words in str(caught.value)


def test_references_to_any_part_are_followed() -> None:
    """Also where an argument has a grammar of its own."""
    pytest.importorskip("xgrammar")
    properties = {
        "a": {"$ref": "#/$defs/small"},
        "b": {"type": "array", "items": {"$ref": "#/properties/a"}},
    }
    parameters = {"properties": properties, "required": ["a", "b"]}
    tool = function("put", {**parameters, "$defs": {"small": {"enum": [1, 2]}}})
    for name, before, after in (
        ("llama-4", "[put(a=1, b=[2, ", "])]"),
        ("gemma-4", "<|tool_call>call:put{a:1,b:[2,", "]}<tool_call|>"),
        ("mistral", '[TOOL_CALLS][{"name": "put", "arguments": {"a": 1, "b": [2, ', "]}}]"),
    ):
        tag = grammar(FAMILIES[name], tools=[tool], tool_choice="required")
        assert accepts(tag, f"{before}1{after}")
        assert not accepts(tag, f"{before}3{after}")


def test_an_answer_in_json_is_in_the_channel_of_answers() -> None:
    """After reasoning, if there is some."""
    pytest.importorskip("xgrammar")
    family = FAMILIES["gpt-oss"]
    tag = grammar(family, response_format={"type": "json_object"})
    for answer, allowed in (
        ('<|channel|>final<|message|>{"a": 1}', True),
        (family.thought + '<|channel|>final<|message|>{"a": 1}', True),
        ('{"a": 1}', False),
        ("<|channel|>final<|message|>a", False),
    ):
        assert accepts(tag, answer) == allowed


def test_effort_reaches_the_template_and_switches_thinking() -> None:
    for name, effort, want in (
        ("gpt-oss", "low", "Reasoning: low"),
        ("gemma-4", "high", "<|think|>"),
        ("glm-4.5", "none", "<think>\n\n</think>"),
    ):
        scripted = Scripted(FAMILIES[name].tokenizer, "Yes.")
        scripted.chat(messages=ASK, reasoning_effort=effort)
        assert want in scripted.engine.prompts[0]


@pytest.mark.parametrize("name", ["gpt-oss", "gemma-4", "mistral", "granite", "olmo-3"])
def test_reasoning_can_stay_in_the_content_or_be_left_out(name: str) -> None:
    family = FAMILIES[name]
    answer = "<|channel|>final<|message|>Yes." if name == "gpt-oss" else "Yes."
    for body, content in (
        ({"include_reasoning": False}, "Yes."),
        ({"separate_reasoning": False}, None),
    ):
        for stream in (False, True):
            scripted = Scripted(family.tokenizer, family.thought + answer)
            extra = {**THINKING, **body}
            got = scripted.chat(messages=ASK, stream=stream, extra_body=extra)
            text, thought, _, _ = parsed(got, stream)
            assert thought == ""
            if content is None:
                assert "The user asks." in text and text.endswith("Yes.")
                assert text.startswith(family.thought.split("The")[0].strip())
            else:
                assert text == content


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_tokens_of_reasoning_are_counted(family: Family) -> None:
    scripted = Scripted(family.tokenizer, family.thought + family.calls)
    answer = scripted.chat(messages=ASK, tools=TOOLS, extra_body=THINKING)
    marks = family.thought.removesuffix("<|start|>assistant").rstrip()
    details = answer.usage.completion_tokens_details
    if family.reasoning == "none":
        assert details is None or not details.reasoning_tokens
    else:
        assert details.reasoning_tokens == len(family.tokenizer(marks)["input_ids"])


SIBLINGS = [
    ("llama-4", "[now(), rain(x=[1, 2]), now()]", "rain(x=[1, 2])"),
    ("olmo-3", "</think><function_calls>now()\nrain(1)\nnow()</function_calls>", "rain(1)"),
    (
        "granite",
        '<|tool_call|>[{"name": "now"}, {"name": "rain", "arguments": {}}, {"name": "now"}]',
        '{"name": "rain", "arguments": {}}',
    ),
]


@pytest.mark.parametrize(("name", "answer", "malformed"), SIBLINGS)
def test_calls_beside_a_malformed_one_are_calls(name: str, answer: str, malformed: str) -> None:
    for stream in (False, True):
        scripted = Scripted(FAMILIES[name].tokenizer, answer)
        got = scripted.chat(messages=ASK, tools=TOOLS, stream=stream)
        text, _, calls, finish = parsed(got, stream)
        assert (text, calls, finish) == (malformed, [("now", {}), ("now", {})], "tool_calls")


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", some_of([(3,), (12,)], 0))
def test_truncated_calls_are_broken_alike_whole_and_streamed(lengths: int) -> None:
    """Whatever the length, nothing that was announced is taken back."""
    for family in FAMILIES.values():
        tokens = len(family.tokenizer(family.calls)["input_ids"])
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        body: Any = {"messages": ASK, "tools": TOOLS, "extra_body": off}
        bodies = [
            {**body, "max_tokens": most, "stream": stream}
            for most in range(1, tokens, max(1, tokens // lengths))
            for stream in (False, True)
        ]
        answers = Scripted(family.tokenizer, *[family.calls] * len(bodies)).chats(bodies)
        for whole, chunks in zip(answers[::2], answers[1::2], strict=True):
            seen = []
            for deltas in [whole.choices[0].message], [c.choices[0].delta for c in chunks]:
                pieces = [call.function for d in deltas for call in d.tool_calls or []]
                seen.append(
                    (
                        "".join(d.content or "" for d in deltas),
                        [piece.name for piece in pieces if piece.name],
                        "".join(piece.arguments for piece in pieces),
                    )
                )
            assert seen[0] == seen[1]
