"""`/v1/score`: pairs of texts as in vLLM, or labels after texts as in SGLang."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from forerun.core.errors import RequestError
from forerun.core.logprobs import LogprobParams
from forerun.llm.scoring import ONE_TOKEN, Pair, ScorePrompt, paired
from forerun.server.http.client_names import in_client_names
from forerun.server.http.errors import json_response
from forerun.server.http.strict_model import Many, Scheduled
from forerun.server.pooling.run import answered, check_inputs, ended, prompt_usage
from forerun.server.service import Service

PATHS = ("/v1/score", "/score")
# Of the two texts, in vLLM's spellings.
SPELLINGS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
Texts = str | Many[str]


class ScoreRequest(Scheduled):
    """`POST /v1/score`: either `text_1` and `text_2`, or `query`, `items` and `label_token_ids`."""

    ignored = ("user",)

    model: str | None = None
    text_1: Texts | None = Field(None, description="One text, or one per text_2")
    text_2: Texts | None = None
    queries: Texts | None = Field(None, description="text_1")
    documents: Texts | None = Field(None, description="text_2")
    data_1: Texts | None = Field(None, description="text_1")
    data_2: Texts | None = Field(None, description="text_2")
    instruct: str | None = Field(
        None, description="What documents are looked for; for yes_no scores"
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Longer prompts are shortened to this; -1: to the context length"
    )
    query: str | Many[int] | None = Field(None, description="What every prompt begins with")
    items: Texts | Many[Many[int]] | None = Field(
        None, description="What each prompt ends with, text or token ids as the query"
    )
    label_token_ids: Many[int] | None = Field(
        None, description="Tokens whose probabilities after each prompt are the scores"
    )
    apply_softmax: bool | None = Field(None, description="Probabilities among the labels alone")
    item_first: bool | None = Field(None, description="The items come before the query")

    @model_validator(mode="after")
    def _can_be_served(self) -> ScoreRequest:
        for name in (*(name for pair in SPELLINGS for name in pair), "items"):
            if (given := getattr(self, name)) is not None:
                check_inputs(name, given)
        return self

    @property
    def texts(self) -> tuple[list[str], list[str]] | None:
        """First and second texts; None: none are given.

        Raises:
            RequestError: one of them is missing, or they are given twice.
        """
        given = [
            pair for pair in SPELLINGS if any(getattr(self, name) is not None for name in pair)
        ]
        if not given:
            return None
        (first, second), *others = given
        one, two = getattr(self, first), getattr(self, second)
        if others or one is None or two is None:
            raise RequestError("Give both text_1 and text_2, once.")
        return _listed(one), _listed(two)


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def score_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def score(body: ScoreRequest, request: Request) -> Response:
        """Scores pairs of texts, or labels after texts."""
        texts = body.texts
        if (texts is None) == (body.query is None and body.items is None):
            raise RequestError(
                "Give either text_1 and text_2, or query, items and label_token_ids."
            )
        answer = partial(_labels, service, body)
        if texts is not None:
            answer = partial(_pairs, service, body, *texts)
        return await answered(service, body.model, request, answer)

    for path in PATHS:
        router.add_api_route(path, score, methods=["POST"])
    return router


async def _pairs(
    service: Service, body: ScoreRequest, first: list[str], second: list[str]
) -> Response:
    pairs = [Pair(*each) for each in paired(first, second)]
    service.check_size(second)
    at_most = service.most_tokens(body.truncate_prompt_tokens)
    prepare = partial(service.scorer.run, pairs, at_most, body.instruct)
    longest = service.max_prompt_tokens
    run = await service.text.convert([*first, *second], at_most, longest, prepare)
    records = await ended(service, run.prompts, body.scheduling)
    data = [
        {"index": index, "object": "score", "score": value}
        for index, value in enumerate(run.scores(records))
    ]
    return json_response(
        {
            "id": f"score-{uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or service.model_name,
            "data": data,
            "usage": prompt_usage(records),
        }
    )


async def _labels(service: Service, body: ScoreRequest) -> Response:
    if not body.label_token_ids:
        raise RequestError("label_token_ids is missing; give the ids of the labels' tokens.")
    if body.instruct is not None or body.truncate_prompt_tokens is not None:
        raise RequestError("instruct and truncate_prompt_tokens are for text_1 and text_2.")
    asked = LogprobParams(token_ids=tuple(body.label_token_ids))
    joined = _joined(body)
    service.check_size(joined)
    texts = [each for each in joined if isinstance(each, str)]
    lists = [each for each in joined if isinstance(each, list)]
    if texts:
        lists = await service.text.encode(texts, service.max_prompt_tokens)
    prompts = [ScorePrompt(ids, ONE_TOKEN, asked) for ids in lists]
    with in_client_names({"token_ids_logprob": "label_token_ids"}):
        records = await ended(service, prompts, body.scheduling)
    values = [record.output_logprobs[0].of_ids for record in records]
    return json_response(
        {
            "object": "scoring",
            "model": body.model or service.model_name,
            "scores": [_probabilities(each, bool(body.apply_softmax)) for each in values],
            "usage": prompt_usage(records),
        }
    )


def _joined(body: ScoreRequest) -> Any:
    """The prompts: query and item, in this order or the other; all texts, or all token ids.

    Raises:
        RequestError: one of them is missing, or of the other kind.
    """
    query, items = body.query, body.items
    if query is None or items is None:
        raise RequestError("Give both query and items.")
    listed: Any = [items] if isinstance(items, str) else items
    if type(listed[0]) is not type(query):
        raise RequestError("query and items must both be text, or both be token ids.")
    return [item + query if body.item_first else query + item for item in listed]


def _probabilities(logprobs: Sequence[float], among_themselves: bool) -> list[float]:
    largest = max(logprobs) if among_themselves else 0.0
    values = [math.exp(each - largest) for each in logprobs]
    total = sum(values) if among_themselves else 1.0
    return [each / total for each in values]
