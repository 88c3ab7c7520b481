"""Anthropic's messages, made of blocks, as messages of chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from forerun.core.errors import RequestError, shown
from forerun.llm.prompts import SEPARATOR

Block = Mapping[str, Any]
Turn = tuple[str, list[Block]]  # role and blocks
ROLES = ("user", "assistant", "system")
MEDIA = ("image", "document")
# Claude Code's first block of a system prompt. It differs from request to request, so that no
# prefix would be found in the cache, and is for Anthropic's billing alone.
BILLING = "x-anthropic-billing-header:"


def chat_messages(
    system: str | Sequence[Block] | None, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation as chat completions take it. Neighbours of the same role are one message.

    Raises:
        RequestError: a message or block is invalid, or not text.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message.")
    chat = _system(system)
    names: dict[str, str] = {}  # of tools, by the id of their use
    for role, blocks in _turns(messages):
        if role == "assistant":
            message = _assistant(blocks)
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
            chat.append(message)
        elif role == "user":
            chat += _user(blocks, names)
        else:
            chat.append({"role": "system", "content": _text(blocks, "a system message")})
    if chat[-1].get("tool_calls"):
        raise RequestError("The last message has a tool_use; add a message with its tool_result.")
    if chat[-1]["role"] == "assistant" and not chat[-1]["content"]:
        raise RequestError("The last message is the assistant's and has no text to go on from.")
    return chat


def _system(given: str | Sequence[Block] | None) -> list[dict[str, Any]]:
    blocks = [block for block in _blocks(given) if not _is_billing(block)] if given else []
    return [{"role": "system", "content": _text(blocks, "system")}] if blocks else []


def _is_billing(block: Block) -> bool:
    text = block.get("text")
    return isinstance(text, str) and text.startswith(BILLING)


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    turns: list[Turn] = []
    for message in messages:
        role = message.get("role")
        if role not in ROLES or "content" not in message:
            known = "'user', 'assistant' or 'system'"
            raise RequestError(
                f"A message needs content and the role {known}, got {shown(message)}."
            )
        blocks = _blocks(message["content"])
        if not blocks and role == "user":
            raise RequestError("The content of a user's message is empty; give at least one block.")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _blocks(content: Any) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"content must be text or a list of blocks, got {shown(content)}.")
    for block in content:
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise RequestError(f"A block of content needs a type, got {shown(block)}.")
        if block["type"] in MEDIA:
            raise RequestError(
                f"Blocks of type {block['type']!r} are not supported: this server reads text only."
            )
    return list(content)


def _assistant(blocks: Iterable[Block]) -> dict[str, Any]:
    """One turn; its text joined as chat completions join what the model writes around calls."""
    text = thought = ""
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(more)}:
                text += more
            case {"type": "thinking", "thinking": str(more)}:
                thought += more
            case {"type": "redacted_thinking"}:  # encrypted, by another server
                pass
            case {
                "type": "tool_use",
                "id": str(id),
                "name": str(name),
                "input": Mapping() as given,
            }:
                function = {"name": name, "arguments": given}
                calls.append({"id": id, "type": "function", "function": function})
            case _:
                raise _unknown(block, "an assistant's message", "text, thinking, tool_use")
    reasoning = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": text, **reasoning, "tool_calls": calls}


def _user(blocks: Iterable[Block], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Results of tools, and then the text."""
    texts: list[Block] = []
    for block in blocks:
        if block["type"] == "tool_result":
            yield _result(block, names)
        else:
            texts.append(block)
    if texts:
        yield {"role": "user", "content": _text(texts, "a user's message", "text, tool_result")}


def _result(block: Block, names: Mapping[str, str]) -> dict[str, Any]:
    ident = block.get("tool_use_id")
    if not isinstance(ident, str) or ident not in names:
        raise RequestError(
            f"The tool_use_id {shown(ident)} of a tool_result is not the id of an earlier tool_use."
        )
    text = _text(_blocks(block.get("content") or ""), "a tool_result")
    if block.get("is_error") is True:  # chat templates have no place for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": ident, "name": names[ident], "content": text}


def _text(blocks: Iterable[Block], where: str, known: str = "text") -> str:
    texts = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _unknown(block, where, known)
    return SEPARATOR.join(texts)


def _unknown(block: Block, where: str, known: str) -> RequestError:
    return RequestError(f"The blocks of {where} may be {known}, got {shown(block)}.")
