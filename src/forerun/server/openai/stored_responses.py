"""`/v1/responses/{id}` and what is below it: responses that run or are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from forerun.core.errors import RequestError, shown
from forerun.server.http.errors import bad_request, json_response
from forerun.server.openai.background import Background
from forerun.server.openai.response_state import owner
from forerun.server.openai.response_store import RESPONSE, Item, ResponseStore

MAX_PAGE = 100
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Order = Literal["asc", "desc"]


def add_stored_responses(router: APIRouter, store: ResponseStore, background: Background) -> None:
    @router.get("/v1/responses/{ident}")
    async def retrieve(ident: str, stream: bool = False) -> Response:
        """A response that runs in the background or is stored."""
        if stream:
            raise RequestError("A response that is stored cannot be streamed; get it as it is.")
        run = background.find(ident)
        if run is not None:
            return json_response(run.now())
        return json_response((await store.get(owner(), RESPONSE, ident)).body)

    @router.delete("/v1/responses/{ident}")
    async def delete(ident: str) -> Response:
        """Deletes a response; one that runs ends."""
        if background.find(ident) is not None:
            await background.end(ident, delete=True)
        else:
            await store.delete(owner(), RESPONSE, ident)
        return json_response({"id": ident, "object": "response", "deleted": True})

    @router.post("/v1/responses/{ident}/cancel")
    async def cancel(ident: str) -> Response:
        """Ends a response that runs in the background; another one stays as it is."""
        if background.find(ident) is not None:
            return json_response(await background.end(ident, delete=False))
        response = (await store.get(owner(), RESPONSE, ident)).body
        if not response["background"]:
            raise bad_request("Only responses that run in the background can be cancelled.")
        return json_response(response)

    @router.get("/v1/responses/{ident}/input_items")
    async def input_items(
        ident: str, limit: Limit = 20, order: Order = "desc", after: str | None = None
    ) -> Response:
        """What a response answers: earlier items and its own input."""
        run = background.find(ident)
        if run is not None:
            items: Sequence[Item] = [*run.answer.state.earlier, *run.answer.state.own]
        else:
            items = (await store.get(owner(), RESPONSE, ident)).items
        return json_response(item_page(items, limit, order, after))


def item_page(items: Sequence[Item], limit: int, order: Order, after: str | None) -> dict[str, Any]:
    """A part of a list of items, as OpenAI's lists are.

    Args:
        order: "desc": the newest first.
        after: id of the item before the part.

    Raises:
        RequestError: there is no such item.
    """
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise RequestError(f"after is {shown(after)}, which is not the id of an item.")
        start = ids.index(after) + 1
    page = ordered[start : start + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    empty = {"first_id": None, "last_id": None}
    more = {"has_more": start + limit < len(ordered)}
    return {"object": "list", "data": page, **empty, **ends, **more}
