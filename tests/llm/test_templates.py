"""Chat templates: the text is transformers'; what a template does has limits, and is one line."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from forerun.core.errors import RequestError
from forerun.llm import template_process, templates
from forerun.llm.bundled import bundled
from forerun.llm.prompts import chat_ids
from forerun.llm.templates import TemplateFailedError, render, render_chat
from tests.server import templates as models

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {
    "type": "function",
    "id": "c1",
    "function": {"name": "f", "arguments": {"é": "<b>", "n": [1]}},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "S\n"},
    {"role": "user", "content": "Grüße <b> & 'you' \U0001f44d"},
    {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "c1"},
]
CONSTRUCTS = """
{%- set ns = namespace(n=0, seen=false) %}
    {% for m in messages %}
        {%- if loop.index0 == 3 %}{% break %}{% endif %}
        {%- set ns.n = ns.n + 1 %}
<{{ m.role }}|{{ m['content'] | trim }}|{{ m.get('thinking') }}|{{ loop.last }}>
        {%- generation %}{{ m.content | upper }}{% set ns.seen = true %}{% endgeneration %}
    {% endfor %}
{{ ns.n }} {{ ns.seen }} {{ bos_token }} {{ eos_token }} {{ tools | tojson }} {{ documents }}
{{ tools | tojson(indent=2) }} {{ messages[2].tool_calls[0].function.arguments | tojson }}
{{ dict(a=1, b=[1, none, true]) }} {{ messages[1:] | length }} {{ x is defined }} {{ given }}
{{ strftime_now('%Y') | length }} {{ missing }} {{ messages | map(attribute='role') | join(',') }}
{% macro say(what) %}[{{ what }}]{% endmacro %}{{ say('a') }} {{ add_generation_prompt }}
"""
KNOWN = (
    CONSTRUCTS, models.PLAIN, models.QWEN3, models.LLAMA3, models.UNKNOWN,
)  # fmt: skip


@cache
def tokenizer(template: Any) -> Any:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(str(bundled("target")), local_files_only=True)
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", KNOWN)
@pytest.mark.parametrize("variables", [{}, {"tools": TOOLS, "given": {"a": [1.5, None]}}])
def test_the_text_is_that_of_transformers(template: str, variables: dict[str, Any]) -> None:
    made = tokenizer(template)
    assert render_chat(made, CONVERSATION, variables) == made.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, tokenize=False, **variables
    )


def test_one_of_several_templates() -> None:
    made = tokenizer.__wrapped__({"default": "plain", "tool_use": "tools"})
    assert render_chat(made, CONVERSATION, {}) == "plain"
    assert render_chat(made, CONVERSATION, {"tools": TOOLS}) == "tools"


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 1)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(a='x') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS, "it takes longer than 1 s"),
        ("{{ 'x' * 10**10 }}", "it needs too much memory"),
        (DOUBLING, "it "),  # too much memory, or too long until then
        ("{{ 'x'.center(10**8) }}", "it writes more than"),
        ("{{ ('x' * 10**5) | replace('x', 'y' * 10**5) }}", "it needs too much memory"),
        ("\n{{ 1 // 0 }}", "ZeroDivisionError: integer division or modulo by zero (line 2 of the"),
        ("{{ 'a' | center('b') }}", "TypeError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        ("{{ " + "(" * 5000, "RecursionError: "),
        ("{{ messages.x.y }}", "'list object' has no attribute 'x' (line 1"),
        ("a\n{% if %}", "got 'end of statement block' (line 2"),
        ("{{ raise_exception('No\nsystem.') }}", "No system. (line 1"),
        ("{{ ''.__class__ .__mro__ }}", "is unsafe"),
        ("{{ namespace(_a=1) }}", "begins with an underscore"),
        (None, "there is none"),
        ({"a": "x"}, "no default specified"),
    ],
)
def test_what_goes_wrong_is_one_line(template: Any, words: str, one_second: None) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError) as caught:
        chat_ids(tokenizer.__wrapped__(template), [CONVERSATION[1]])
    assert time.monotonic() - begin < 20
    line = str(caught.value)
    assert line.startswith(f"The chat template of {bundled('target')} does not take these")
    assert words in line and "\n" not in line and len(line) < 600
    assert render("{{ messages }}", {"messages": []}) == "[]"  # the next one is served


def test_values_are_json() -> None:
    with pytest.raises(TemplateFailedError, match=r"not plain JSON .*object is no JSON value"):
        render("", {"messages": [], "x": object()})
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    with pytest.raises(TemplateFailedError, match="not plain JSON"):
        render("", {"messages": [], "x": deep})


def test_threads_do_not_wait_for_one_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(3) as pool:
        while len(templates._workers._idle) < 3:  # to start one may take longer than the limit
            list(pool.map(lambda _: render("", {"messages": []}), range(3)))
        monkeypatch.setattr(templates, "MAX_SECONDS", 1)
        slow = [pool.submit(render, ENDLESS, {"messages": []}) for _ in range(2)]
        assert pool.submit(render, "{{ x }}", {"messages": [], "x": 5}).result() == "5"
        assert not any(each.done() for each in slow)
        for each in slow:
            with pytest.raises(TemplateFailedError, match="longer than 1 s"):
                each.result()


def test_a_process_that_is_gone_is_replaced() -> None:
    assert render("a", {"messages": []}) == "a"
    worker = templates._workers._idle[-1]
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(TemplateFailedError, match=r"ended with exit code -9"):
        render("a", {"messages": []})
    assert render("a", {"messages": []}) == "a"


def test_answers_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in this process, whose CPU time is not limited."""
    monkeypatch.setattr(template_process, "limit_cpu", lambda seconds: None)
    asked = {"template": "{{ x }}", "variables": {"messages": [], "x": "é"}, "seconds": 1}
    for most, key in ((1, "text"), (0, "reason")):
        message = json.dumps({**asked, "max_characters": most}).encode()
        assert list(json.loads(template_process.answer(message))) == [key]
