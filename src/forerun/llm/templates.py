"""Chat templates, rendered in processes that have limits and can be ended.

A template comes with a checkpoint, and clients choose its variables: a loop in a loop, or
`'x' * 10**9`, must not hold up or take down the process that serves everybody.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from forerun.llm import template_process
from forerun.platform.limited_process import (
    LimitedProcess,
    ProcessEndedError,
    ProcessTimeoutError,
)

MAX_SECONDS = 5  # of one conversation; usual ones take a thousandth of it
MAX_CHARACTERS = 1 << 26  # of one conversation
MAX_WORKERS = 4  # conversations that are rendered at once


class TemplateFailedError(Exception):
    """A template does not render a conversation; the message says why."""


class _Workers:
    """Processes, as many as are needed at once. Any thread may use them."""

    def __init__(self) -> None:
        self._idle: list[LimitedProcess] = []
        self._free = threading.BoundedSemaphore(MAX_WORKERS)

    def ask(self, message: bytes, seconds: float) -> bytes:
        """The answer of one of them.

        Raises:
            TemplateFailedError: it takes longer than `seconds`, or ended.
        """
        with self._free:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = None
            try:
                worker = worker or LimitedProcess(template_process.__file__)
                answer = worker.ask(message, seconds)
            except (ProcessTimeoutError, ProcessEndedError) as error:
                raise TemplateFailedError(str(error)) from None
            self._idle.append(worker)
            return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


_workers = _Workers()
atexit.register(lambda: _workers.close())


def _after_fork() -> None:
    """A child starts processes of its own; those of its parent are in use there."""
    global _workers
    _workers = _Workers()


os.register_at_fork(after_in_child=_after_fork)


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """A conversation in a tokenizer's chat template, up to where the answer begins.

    Args:
        variables: of the template: JSON values. `tools` is one of them.

    Raises:
        TemplateFailedError: there is no template, or as `render`.
    """
    tools, kind = variables.get("tools"), cast(Any, type(tokenizer))
    try:
        if not _has_template(kind):
            text: str = tokenizer.apply_chat_template(
                list(messages), tokenize=False, **{"add_generation_prompt": True, **variables}
            )
            return text
        if not tokenizer.chat_template:
            raise TemplateFailedError("there is none")
        template = tokenizer.get_chat_template(tools=tools)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise TemplateFailedError(template_process.reason(error).rstrip(".")) from error
    special = {
        name: [str(each) for each in value] if isinstance(value, list) else str(value)
        for name, value in tokenizer.special_tokens_map.items()
    }
    always = {"tools": tools, "documents": None, "add_generation_prompt": True}
    return render(template, {**special, **always, **variables, "messages": messages})


@cache
def _has_template(kind: type[Any]) -> bool:
    """Whether tokenizers of this class write conversations with a template in Jinja."""
    from transformers import PreTrainedTokenizerBase

    return (
        issubclass(kind, PreTrainedTokenizerBase)
        and kind.apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    )


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a conversation.

    Args:
        variables: of the template: JSON values. `messages` is one of them.

    Raises:
        TemplateFailedError: it refuses the conversation, fails, or goes over a limit.
    """
    asked = {
        "template": template,
        "variables": variables,
        "seconds": MAX_SECONDS,
        "max_characters": MAX_CHARACTERS,
    }
    try:
        message = json.dumps(asked, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateFailedError(f"they are not plain JSON ({error})") from None
    answer = json.loads(_workers.ask(message, MAX_SECONDS))
    if "text" not in answer:
        raise TemplateFailedError(answer["reason"].rstrip("."))
    text: str = answer["text"]
    return text


def _plain(value: object) -> Any:
    """A value that JSON lacks: mappings of other types.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")
