"""Converts prompts and chat messages to token ids."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from forerun.core.checks import boolean
from forerun.core.errors import RequestError, shown

CONTINUED = "forerun-continues-here"  # marks the end of a message that goes on
SEPARATOR = "\n"  # between the text parts of a message, as in vLLM


class Ending(NamedTuple):
    """How a conversation's prompt ends."""

    generation_prompt: bool = True  # where an answer begins; False: with the last message
    continues: bool = False  # within the last message, whose text goes on

    @classmethod
    def of(cls, add_generation_prompt: Any = None, continue_final_message: Any = None) -> Ending:
        """The ending that vLLM's two parameters ask for; None: not given.

        Raises:
            RequestError: they are not booleans, or contradict each other.
        """
        for name, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if value is not None:
                boolean(name, value, RequestError)
        continues = bool(continue_final_message)
        if continues and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true; set one of them."
            )
        return cls(not continues and add_generation_prompt is not False, continues)


AT_ANSWER = Ending()


def token_lists(input_ids: Any) -> tuple[list[list[int]], bool]:
    """Lists of token ids, and whether `input_ids` was a single list. The engine checks the ids.

    Raises:
        RequestError: it is neither a list nor a list of lists.
    """
    if not isinstance(input_ids, list | tuple):
        raise RequestError(
            "input_ids must be a list of token ids or a list of such lists, got"
            f" {type(input_ids).__name__} {shown(input_ids)}."
        )
    if not any(isinstance(ids, list | tuple) for ids in input_ids):
        return [list(input_ids)], True
    for ids in input_ids:
        if not isinstance(ids, list | tuple):
            raise RequestError(f"input_ids mixes lists with {shown(ids)}; give lists only.")
    return [list(ids) for ids in input_ids], False


def text_ids(
    tokenizer: Any, prompts: Any, add_special_tokens: bool = True
) -> tuple[list[list[int]], bool]:
    """Token ids of texts, and whether `prompts` was a single text.

    Raises:
        RequestError: it is neither text nor a list of texts.
    """
    texts, single = text_list(prompts)
    options = {} if add_special_tokens else {"add_special_tokens": False}
    return [encode(tokenizer, text, **options) for text in texts], single


def text_list(prompts: Any) -> tuple[list[str], bool]:
    """Texts, and whether `prompts` was a single one.

    Raises:
        RequestError: it is neither text nor a list of texts.
    """
    single = isinstance(prompts, str)
    texts = [prompts] if single else prompts
    if not isinstance(texts, list | tuple):
        raise RequestError(f"prompts must be text or a list of texts, got {shown(prompts)}.")
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"A prompt must be text, got {shown(text)}.")
    return list(texts), single


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Token ids of a text.

    Raises:
        RequestError: the text cannot be encoded in UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text has a lone surrogate, {shown(text[error.start])}, which is not a character;"
            " remove it."
        ) from None
    # not verbose: a text over the model's length is refused in our own words
    ids: list[int] = tokenizer(text, verbose=False, **options)["input_ids"]
    return ids


def chat_ids(
    tokenizer: Any,
    messages: Any,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    check_text: Callable[[str], None] | None = None,
    ending: Ending = AT_ANSWER,
) -> tuple[list[list[int]], bool]:
    """Token ids of conversations in the chat template, and whether it was a single one.

    Args:
        template_kwargs: variables of the template.
        tools: functions that may be called, in OpenAI's form.
        check_text: called with each conversation in the template before it is tokenized, which
            takes longer than everything else.

    Raises:
        RequestError: invalid messages, or the template refuses them.
    """
    variables = _template_variables(tokenizer, template_kwargs or {})
    if isinstance(messages, Mapping):
        raise RequestError("messages is one message; put it into a list: [{...}].")
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages must be a list of messages, got {shown(messages)}.")
    if not messages:
        raise RequestError("messages is empty; give at least one message.")
    single = not isinstance(messages[0], list | tuple)
    conversations = [messages] if single else messages
    if tools:
        variables["tools"] = _functions(tools)
    if not ending.generation_prompt:
        variables["add_generation_prompt"] = False
    texts = [chat_text(tokenizer, c, variables, ending.continues) for c in conversations]
    if check_text is not None:
        for text in texts:
            check_text(text)
    return [encode(tokenizer, text, add_special_tokens=False) for text in texts], single


def _functions(tools: Any) -> list[Any]:
    """Tools as a template gets them."""
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        example = '[{"type": "function", "function": {"name": ...}}]'
        raise RequestError(f"tools must be a list of functions, {example}, got {shown(tools)}.")
    return list(tools)


def _template_variables(tokenizer: Any, given: Any) -> dict[str, Any]:
    """Parameters of the method that renders are refused: one of them is the template itself."""
    if not isinstance(given, Mapping):
        raise RequestError(f"chat_template_kwargs must be an object, got {shown(given)}.")
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in given:
        if name in reserved:
            raise RequestError(
                f"chat_template_kwargs may not set {shown(name)}; it takes variables of the model's"
                " chat template."
            )
    return {str(name): value for name, value in given.items()}


def chat_text(
    tokenizer: Any, conversation: Any, variables: Mapping[str, Any], continues: bool = False
) -> str:
    """A conversation in the chat template, up to where the answer begins.

    Args:
        continues: up to the end of the last message's text.

    Raises:
        RequestError: as `chat_ids`.
    """
    from forerun.llm.templates import TemplateFailedError, render_chat  # POSIX only

    if not isinstance(conversation, list | tuple) or not conversation:
        raise RequestError(
            f"A conversation must be a non-empty list of messages, got {shown(conversation)}."
        )
    messages = [_message(message) for message in conversation]
    if continues:
        messages[-1] = _marked(messages[-1])
    try:
        text = render_chat(tokenizer, messages, variables)
    except TemplateFailedError as error:
        of = f" of {tokenizer.name_or_path}" if tokenizer.name_or_path else ""
        raise RequestError(
            f"The chat template{of} does not take these messages: {error}. Use generate for plain"
            " text."
        ) from error
    if continues and CONTINUED not in text:
        raise RequestError(
            "continue_final_message: the chat template does not write the last message's text."
        )
    return text[: text.rindex(CONTINUED)] if continues else text


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The last message, with a mark where its text is to go on."""
    if message["role"] != "assistant" or not message["content"] or message.get("tool_calls"):
        raise RequestError(
            "continue_final_message needs a last message of the role 'assistant' with text and"
            " without tool calls."
        )
    return {**message, "content": message["content"] + CONTINUED}


def _message(message: Any) -> dict[str, Any]:
    """The message with text as its content; None is allowed of an assistant."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"A message needs 'role' and 'content', got {shown(message)}.")
    if "content" not in message and "tool_calls" not in message:
        raise RequestError(f"A message needs 'role' and 'content', got {shown(dict(message))}.")
    content = _content(message.get("content"))
    if content is None and message["role"] != "assistant":
        raise RequestError(f"The content of a {shown(message['role'])} message must be text.")
    return {**message, "content": content}


def _content(content: Any) -> str | None:
    """Text, or the text parts of OpenAI's list form, joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"The content of a message must be text, got {shown(content)}.")
    return SEPARATOR.join(map(_part, content))


def _part(part: Any) -> str:
    if not isinstance(part, Mapping) or "type" not in part:
        raise RequestError(
            "A part of a message's content must be {'type': 'text', 'text': ...}, got"
            f" {shown(part)}."
        )
    if part["type"] != "text":
        raise RequestError(
            f"Content of type {shown(part['type'])} is not supported: this engine reads text only."
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"A text part needs 'text', a string, got {shown(dict(part))}.")
    text: str = part["text"]
    return text
