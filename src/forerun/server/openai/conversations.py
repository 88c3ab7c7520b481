"""`/v1/conversations`: conversations that are stored, to which responses are added."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from forerun.core.errors import shown
from forerun.server.http.errors import ApiError, json_response
from forerun.server.http.strict_model import FirstError, StrictModel
from forerun.server.openai.response_state import full, listed_item, owner
from forerun.server.openai.response_store import (
    CONVERSATION,
    Entry,
    Item,
    ResponseStore,
    encoded_size,
)
from forerun.server.openai.responses_protocol import MAX_METADATA, item_messages
from forerun.server.openai.stored_responses import Limit, Order, item_page

MAX_ITEMS = 20  # added at once, as in OpenAI's API
Items = Annotated[list[dict[str, Any]], FirstError(MAX_ITEMS)]
Metadata = Annotated[dict[str, Any], Field(max_length=MAX_METADATA)]


class NewConversation(StrictModel):
    """`POST /v1/conversations`."""

    items: Items | None = None
    metadata: Metadata | None = None


class ConversationUpdate(StrictModel):
    """`POST /v1/conversations/{id}`."""

    metadata: Metadata


class NewItems(StrictModel):
    """`POST /v1/conversations/{id}/items`."""

    items: Items


def conversations_router(store: ResponseStore) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/conversations")
    async def create(body: NewConversation) -> Response:
        """Makes a conversation, with some items or without."""
        items = _checked(body.items or [])
        conversation = {
            "id": f"conv_{uuid4().hex}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        await _check_room(store, [conversation, items], new_entries=1)
        await store.put(owner(), Entry(CONVERSATION, str(conversation["id"]), conversation, items))
        return json_response(conversation)

    @router.get("/v1/conversations/{ident}")
    async def retrieve(ident: str) -> Response:
        """A conversation without its items."""
        return json_response((await store.get(owner(), CONVERSATION, ident)).body)

    @router.post("/v1/conversations/{ident}")
    async def update(ident: str, body: ConversationUpdate) -> Response:
        """Replaces the metadata."""
        await _check_room(store, body.metadata)

        def changed(entry: Entry) -> Entry:
            return replace(entry, body={**entry.body, "metadata": body.metadata})

        return json_response((await store.change(owner(), ident, changed)).body)

    @router.delete("/v1/conversations/{ident}")
    async def delete(ident: str) -> Response:
        """Deletes a conversation; responses that are stored stay."""
        await store.delete(owner(), CONVERSATION, ident)
        return json_response({"id": ident, "object": "conversation.deleted", "deleted": True})

    _add_items(router, store)
    return router


def _add_items(router: APIRouter, store: ResponseStore) -> None:
    @router.get("/v1/conversations/{ident}/items")
    async def items(
        ident: str, limit: Limit = 20, order: Order = "desc", after: str | None = None
    ) -> Response:
        """What was said in a conversation."""
        entry = await store.get(owner(), CONVERSATION, ident)
        return json_response(item_page(entry.items, limit, order, after))

    @router.post("/v1/conversations/{ident}/items")
    async def add(ident: str, body: NewItems) -> Response:
        """Adds items at the end."""
        new = _checked(body.items)
        await _check_room(store, new)
        await store.change(owner(), ident, lambda e: replace(e, items=[*e.items, *new]))
        return json_response(item_page(new, MAX_ITEMS, "asc", None))

    @router.get("/v1/conversations/{ident}/items/{item}")
    async def item(ident: str, item: str) -> Response:
        """One item."""
        entry = await store.get(owner(), CONVERSATION, ident)
        return json_response(_found(entry, item))

    @router.delete("/v1/conversations/{ident}/items/{item}")
    async def remove(ident: str, item: str) -> Response:
        """Deletes one item."""
        entry = await store.change(owner(), ident, _without(item))
        return json_response(entry.body)


def _checked(items: list[Item]) -> list[Item]:
    """
    Raises:
        RequestError: one of them could not be a part of a prompt.
    """
    for _ in item_messages(items):
        pass
    return [listed_item(item) for item in items]


async def _check_room(store: ResponseStore, value: Any, new_entries: int = 0) -> None:
    size = encoded_size("The body", value)
    if not await store.has_room(owner(), size, new_entries):
        raise full()


def _found(entry: Entry, ident: str) -> Item:
    for item in entry.items:
        if item["id"] == ident:
            return item
    raise ApiError(404, f"The conversation has no item {shown(ident)}.", code="item_not_found")


def _without(ident: str) -> Callable[[Entry], Entry]:
    def changed(entry: Entry) -> Entry:
        gone = _found(entry, ident)
        return replace(entry, items=[item for item in entry.items if item is not gone])

    return changed
