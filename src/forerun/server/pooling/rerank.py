"""`/v1/rerank`: documents by relevance, with the requests and answers of Jina, Cohere and vLLM."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from forerun.llm.scoring import Pair
from forerun.server.http.errors import json_response
from forerun.server.http.strict_model import Many, Scheduled, StrictModel, Unsupported
from forerun.server.pooling.run import answered, check_inputs, ended, prompt_usage
from forerun.server.service import Service

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")  # of Jina and SGLang, of Cohere's second API, vLLM


class Document(StrictModel):
    """A document as an object."""

    text: str


class RerankRequest(Scheduled):
    """`POST /v1/rerank`."""

    unsupported: ClassVar[Unsupported] = {
        "max_tokens_per_doc": ((), "use truncate_prompt_tokens"),
        "max_chunks_per_doc": ((), "use truncate_prompt_tokens"),
        "rank_fields": ((["text"],), "documents are their text"),
    }
    ignored = ("user",)

    query: str
    documents: Many[str | Document]
    model: str | None = None
    top_n: int | None = Field(None, ge=0, description="The most relevant only; 0: all")
    return_documents: bool | None = Field(None, description="With their text; default true")
    instruct: str | None = Field(
        None, description="What documents are looked for; for yes_no scores"
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Documents are shortened so that a prompt has at most these; -1: context"
    )

    @model_validator(mode="after")
    def _can_be_served(self) -> RerankRequest:
        check_inputs("documents", self.documents)
        return self

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


def rerank_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Sorts documents by how relevant they are for a query."""
        return await answered(service, body.model, request, partial(_answer, service, body))

    for path in PATHS:
        router.add_api_route(path, rerank, methods=["POST"])
    return router


async def _answer(service: Service, body: RerankRequest) -> Response:
    texts = body.texts
    service.check_size(texts)
    pairs = [Pair(body.query, text) for text in texts]
    at_most = service.most_tokens(body.truncate_prompt_tokens)
    prepare = partial(service.scorer.run, pairs, at_most, body.instruct)
    longest = service.max_prompt_tokens
    run = await service.text.convert([body.query, *texts], at_most, longest, prepare)
    records = await ended(service, run.prompts, body.scheduling)
    scores = run.scores(records)
    order = sorted(range(len(texts)), key=lambda at: -scores[at])[: body.top_n or None]
    results: list[dict[str, Any]] = [
        {"index": at, "relevance_score": scores[at]}
        | ({} if body.return_documents is False else {"document": {"text": texts[at]}})
        for at in order
    ]
    return json_response(
        {
            "id": f"rerank-{uuid4().hex}",
            "model": body.model or service.model_name,
            "results": results,
            "usage": prompt_usage(records),
        }
    )
