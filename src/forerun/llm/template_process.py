"""Renders chat templates in a process of its own, which `templates.py` runs and can end.

A template is code from a checkpoint: here it has little memory, no more CPU time than it is given,
and whatever it raises becomes one line.
"""

from __future__ import annotations

import json
import traceback
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from forerun.platform.limited_process import limit_cpu, serve

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # in order of precedence
MAX_MEMORY = 1 << 30  # bytes that templates may take
MAX_REASON = 200  # characters of an error's message


class RefusedError(TemplateError):
    """What a template says with `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote; the text is the same without it."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """Hides names that begin with an underscore, which could lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"{name!r} of a namespace begins with an underscore")
        super().__setitem__(name, value)


def _raise_exception(message: object) -> None:
    raise RefusedError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter writes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=8)
def compiled(source: str) -> Template:
    """A template as transformers compiles it."""
    environment: Environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
    )
    return environment.from_string(source)


def render(source: str, variables: dict[str, Any], max_characters: int) -> str:
    """The text of a conversation.

    Raises:
        RefusedError: it is longer than `max_characters`, or the template refuses the messages.
    """
    messages = [_with_reasoning(message) for message in variables["messages"]]
    parts, length = [], 0
    for part in compiled(source).generate({**variables, "messages": messages}):
        parts.append(part)
        length += len(part)
        if length > max_characters:
            raise RefusedError(f"it writes more than {max_characters} characters")
    return "".join(parts)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Adds a message's reasoning under the names that templates know."""
    found = next((message[name] for name in REASONING_NAMES if message.get(name) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def reason(error: Exception) -> str:
    """One line: what was raised, and in which line of the template."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    text = " ".join(str(error).split())[:MAX_REASON]
    if not isinstance(error, TemplateError) or not text:
        text = f"{type(error).__name__}{text and ': '}{text}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    if isinstance(error, TemplateSyntaxError):
        lines.append(error.lineno)
    return f"{text} (line {lines[-1]} of the template)" if lines else text


def answer(message: bytes) -> bytes:
    """The text, or why there is none, of one request."""
    try:
        given = json.loads(message)
        limit_cpu(given["seconds"])
        text = render(given["template"], given["variables"], given["max_characters"])
        return json.dumps({"text": text}).encode()
    except Exception as error:  # noqa: BLE001  whatever a template raises
        return json.dumps({"reason": reason(error)}).encode()


if __name__ == "__main__":
    serve(answer, MAX_MEMORY)
