"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Form, UploadFile
from pydantic import Field
from starlette.responses import FileResponse, Response

from forerun.core.errors import RequestError, shown
from forerun.server.batches.folder import BATCH, ENDED, FILE, KeyFolder, Record
from forerun.server.batches.jobs import RESULTS, BatchJobs, new_batch
from forerun.server.http.errors import ApiError, json_response
from forerun.server.http.exchange import current_exchange
from forerun.server.http.strict_model import StrictModel
from forerun.server.openai.stored_responses import Limit, Order, item_page

MAX_NAME = 255


class BatchRequest(StrictModel):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = Field(None, max_length=16)


def batches_router(jobs: BatchJobs | None) -> APIRouter:
    """`jobs`: None: the server has no folder for them, which each of the endpoints says."""
    router = APIRouter()
    _add_files(router, jobs)
    _add_batches(router, jobs)
    return router


def _add_files(router: APIRouter, jobs: BatchJobs | None) -> None:
    @router.post("/v1/files")
    async def upload(file: UploadFile, purpose: Annotated[str, Form()]) -> Response:
        """Keeps a file; it is the input of a batch."""
        folder = _folder(jobs)
        if purpose != BATCH:
            raise RequestError(f"purpose must be 'batch', got {shown(purpose)}.")
        name = (file.filename or "input.jsonl")[:MAX_NAME]
        add = asyncio.to_thread(folder.add_file, name, purpose, file.file)
        return json_response(await add)

    @router.get("/v1/files")
    async def files(
        limit: Limit = 100,
        order: Order = "desc",
        after: str | None = None,
        purpose: str | None = None,
    ) -> Response:
        """All files, or those of a purpose; the newest first, unless `order` is "asc"."""
        records = _folder(jobs).records(FILE)
        kept = [each for each in records if purpose in (None, each["purpose"])]
        return json_response(item_page(kept, limit, order, after))

    @router.get("/v1/files/{ident}")
    async def file(ident: str) -> Response:
        """What is known of a file."""
        return json_response(_folder(jobs).get(FILE, ident))

    @router.get("/v1/files/{ident}/content", response_class=FileResponse)
    async def content(ident: str) -> Response:
        """The file itself."""
        folder = _folder(jobs)
        folder.get(FILE, ident)
        return FileResponse(folder.content(ident), media_type="application/octet-stream")

    @router.delete("/v1/files/{ident}")
    async def delete(ident: str) -> Response:
        """Deletes a file that no batch needs any more."""
        folder = _folder(jobs)
        for batch in folder.records(BATCH):
            used = [batch[name] for name in ("input_file_id", *RESULTS)]
            if ident in used and batch["status"] not in ENDED:
                raise ApiError(
                    409, f"The batch {batch['id']!r} needs this file.", code="file_in_use"
                )
        folder.delete_file(ident)
        return json_response({"id": ident, "object": FILE, "deleted": True})


def _add_batches(router: APIRouter, jobs: BatchJobs | None) -> None:
    @router.post("/v1/batches")
    async def create(body: BatchRequest) -> Response:
        """Starts a batch; get it by its id until it has ended."""
        record = new_batch(_folder(jobs), body.model_dump())
        return json_response(_shown(_of(jobs).start(current_exchange.get().key, record)))

    @router.get("/v1/batches")
    async def batches(limit: Limit = 20, after: str | None = None) -> Response:
        """All batches, the newest first."""
        key = current_exchange.get().key
        records = [_of(jobs).get(key, each["id"]) for each in _folder(jobs).records(BATCH)]
        return json_response(item_page([_shown(each) for each in records], limit, "desc", after))

    @router.get("/v1/batches/{ident}")
    async def batch(ident: str) -> Response:
        """A batch as it is now."""
        return json_response(_shown(_of(jobs).get(current_exchange.get().key, ident)))

    @router.post("/v1/batches/{ident}/cancel")
    async def cancel(ident: str) -> Response:
        """Ends a batch; the results so far stay."""
        return json_response(_shown(await _of(jobs).cancel(current_exchange.get().key, ident)))


def _shown(batch: Record) -> Record:
    """The batch as clients get it: its results have names once they are complete."""
    ended = batch["status"] in ENDED
    return batch if ended else batch | dict.fromkeys(RESULTS)


def _of(jobs: BatchJobs | None) -> BatchJobs:
    if jobs is None:
        raise ApiError(
            400,
            "This server keeps no files; start it with --batch-folder, or use forerun batch.",
            code="no_batch_folder",
        )
    return jobs


def _folder(jobs: BatchJobs | None) -> KeyFolder:
    return _of(jobs).folder.of(current_exchange.get().key)
