"""What a response goes on from, and where it is kept afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from forerun.core.errors import RequestError
from forerun.server.http.errors import ApiError
from forerun.server.http.exchange import current_exchange
from forerun.server.openai.response_store import (
    CONVERSATION,
    OFF,
    RESPONSE,
    Entry,
    Item,
    ResponseStore,
    encoded_size,
)
from forerun.server.openai.responses_output import CANCELLED, FAILED
from forerun.server.openai.responses_protocol import ResponsesRequest

_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_INPUT, _OUTPUT = "input_text", "output_text"


def owner() -> str:
    """Whose entries this request may see: its API key's; "" without one."""
    return current_exchange.get().key or ""


def listed_item(item: Item) -> Item:
    """An item as lists of them have it: with an id, a type, and its text in parts."""
    kind, ident = item.get("type", "message"), item.get("id")
    if not isinstance(ident, str) or not ident:
        ident = f"{_PREFIXES.get(str(kind), 'msg')}_{uuid4().hex}"
    made = {**item, "id": ident, "type": kind}
    if kind == "message":
        made.setdefault("status", "completed")
        if isinstance(item.get("content"), str):
            made["content"] = [_part(item["content"], item.get("role") == "assistant")]
    return made


def _part(text: str, is_output: bool) -> dict[str, Any]:
    if is_output:
        return {"type": _OUTPUT, "text": text, "annotations": []}
    return {"type": _INPUT, "text": text}


@dataclass(frozen=True)
class ResponseState:
    """The state of one request for a response."""

    earlier: Sequence[Item]  # said before
    own: Sequence[Item]  # of this request's input
    stored: bool
    stays: bool
    conversation: str | None
    _owner: str
    _store: ResponseStore

    @classmethod
    async def of(
        cls, store: ResponseStore, body: ResponsesRequest, promised: int = 0
    ) -> ResponseState:
        """`promised`: responses of the client that will be stored when they end.

        Raises:
            ApiError: there is no such response or conversation, or no room for one more.
            RequestError: fields contradict each other.
        """
        whose, conversation = owner(), body.conversation_id
        if conversation is not None and body.previous_response_id is not None:
            raise RequestError("previous_response_id and conversation are set; give one.")
        if body.background and (body.store is False or body.stream):
            other = "stream: true" if body.stream else "store: false"
            raise RequestError(f"background: true does not go with {other}; get it by its id.")
        earlier: Sequence[Item] = ()
        if body.previous_response_id is not None:
            earlier = await _before(store, whose, body.previous_response_id)
        elif conversation is not None:
            earlier = (await store.get(whose, CONVERSATION, conversation)).items
        own = [listed_item(item) for item in body.items]
        needed = bool(body.store) or bool(body.background) or conversation is not None
        stored = body.store is not False
        size = encoded_size("input", [*earlier, *own]) if stored or needed else 0
        if (stored or needed) and not await store.has_room(whose, size, 1 + promised):
            if needed:
                raise full()
            stored = False
        stays = bool(body.store) or bool(body.background)
        return cls(earlier, own, stored, stays, conversation, whose, store)

    @property
    def echo(self) -> dict[str, Any]:
        """What a response says of it."""
        found = None if self.conversation is None else {"id": self.conversation}
        return {"store": self.stored, "conversation": found}

    async def keep(self, response: dict[str, Any]) -> None:
        """Stores a response that has ended, and adds it to its conversation.

        Raises:
            ApiError: the store fails, or the conversation is gone.
        """
        if self.stored:
            items = [*self.earlier, *self.own]
            entry = Entry(RESPONSE, response["id"], response, items, self.stays)
            await self._store.put(self._owner, entry)
        if self.conversation is not None and response["status"] not in (FAILED, CANCELLED):
            more = [*self.own, *response["output"]]
            await self._store.change(self._owner, self.conversation, partial(_longer, more))


def full() -> ApiError:
    """The error of a store that has no room for what must be stored."""
    return ApiError(
        400,
        "The store of responses has no room for it: delete responses or conversations, send store:"
        " false, or raise the server's --max-stored-responses or --max-stored-bytes"
        f" (where {OFF}, nothing is stored).",
        code="store_full",
    )


def _longer(more: Sequence[Item], entry: Entry) -> Entry:
    return replace(entry, items=[*entry.items, *more])


async def _before(store: ResponseStore, whose: str, ident: str) -> list[Item]:
    """What was said up to the end of a response."""
    entry = await store.get(whose, RESPONSE, ident)
    return [*entry.items, *entry.body["output"]]
