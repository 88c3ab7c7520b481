"""`/v1/embeddings`, with OpenAI's requests and answers and some of vLLM's parameters."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from forerun.core.request import RequestRecord
from forerun.llm.pooling import NO_TEXT, PoolingParams, ResolvedPooling, Vector
from forerun.llm.scoring import ScorePrompt
from forerun.server.http.errors import json_response
from forerun.server.http.strict_model import Many, Scheduled, Unsupported
from forerun.server.pooling.run import answered, check_inputs, ended, prompt_usage
from forerun.server.service import Service


class EmbeddingRequest(Scheduled):
    """`POST /v1/embeddings`."""

    unsupported: ClassVar[Unsupported] = {
        "add_special_tokens": ((True,), "send token ids, which are taken as they are"),
        "embed_dtype": (("float32",), "embeddings are float32"),
        "endianness": (("native", "little"), "embeddings are little-endian"),
        "messages": ((), "send their text as input"),
    }
    ignored = ("user",)

    input: str | Many[str] | Many[int] | Many[Many[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of the values as little-endian float32; default float"
    )
    dimensions: int | None = Field(
        None, description="First values only, normalized after that (Matryoshka)"
    )
    normalize: bool | None = Field(None, description="To length 1; default: as the model's folder")
    truncate_prompt_tokens: int | None = Field(
        None, description="Longer inputs are shortened to this; -1: to the context length"
    )

    @model_validator(mode="after")
    def _can_be_served(self) -> EmbeddingRequest:
        given: Any = self.input
        check_inputs("input", [given] if given and isinstance(given[0], int) else given)
        return self

    @property
    def texts(self) -> list[str] | None:
        """Inputs that are text; None: they are token ids."""
        given = self.input
        if isinstance(given, str):
            return [given]
        return [str(each) for each in given] if isinstance(given[0], str) else None

    @property
    def token_lists(self) -> list[list[int]]:
        """Inputs that are token ids."""
        given: Any = self.input
        return given if isinstance(given[0], list) else [given]


def embeddings_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Turns texts into vectors, as OpenAI's API does."""
        return await answered(service, body.model, request, partial(_answer, service, body))

    return router


async def _answer(service: Service, body: EmbeddingRequest) -> Response:
    params = PoolingParams(normalize=body.normalize, dimensions=body.dimensions)
    pooling = service.embedder.resolve(params, service.engine.info)
    at_most = service.most_tokens(body.truncate_prompt_tokens)
    texts = body.texts
    if texts is None:
        lists = [ids[:at_most] for ids in body.token_lists]
        service.check_size(lists)
    else:
        service.check_size(texts)
        encode = partial(service.embedder.text_ids, texts, at_most)
        lists = await service.text.convert(texts, at_most, service.max_prompt_tokens, encode)
    prompts = [ScorePrompt(ids, NO_TEXT, pooling=pooling.pooling) for ids in lists]
    records = await ended(service, prompts, body.scheduling)
    in_base64 = body.encoding_format == "base64"

    def respond() -> Response:
        return json_response(
            {
                "object": "list",
                "data": _data(records, pooling, in_base64),
                "model": body.model or service.model_name,
                "usage": prompt_usage(records),
            }
        )

    return await service.text.run(respond)  # in a thread: many numbers are written


def _data(
    records: Sequence[RequestRecord], pooling: ResolvedPooling, in_base64: bool
) -> list[dict[str, Any]]:
    write = _base64 if in_base64 else _values
    return [
        {"object": "embedding", "index": index, "embedding": write(pooling.vector(record))}
        for index, record in enumerate(records)
    ]


def _values(vector: Vector) -> Any:
    return vector.tolist()


def _base64(vector: Vector) -> Any:
    return b64encode(vector.astype("<f4").tobytes()).decode()
