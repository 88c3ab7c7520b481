"""`/generate`, with SGLang's requests and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from forerun.core.errors import RequestError
from forerun.core.sampling_params import SamplingParams
from forerun.llm.logprobs import LOGPROB_KEYWORDS, logprob_params
from forerun.llm.output import RequestOutput
from forerun.llm.prompts import token_lists
from forerun.llm.token_bytes import TokenBytes
from forerun.server.generation import Call, Generation
from forerun.server.http.errors import json_response
from forerun.server.http.sse import DOCUMENTED_STREAM, DONE, EventStream, event, until_disconnect
from forerun.server.http.strict_model import Many, Scheduled, Unsupported
from forerun.server.logprobs import with_texts
from forerun.server.openai.protocol import StreamOptions
from forerun.server.prompt import Prompt
from forerun.server.service import Service

_TEXT_ONLY = "the input is text or token ids only"


class GenerateRequest(Scheduled):
    """`POST /generate`; either `text` or `input_ids`."""

    unsupported: ClassVar[Unsupported] = {
        "return_hidden_states": ((False,), "hidden states are not returned; leave it out"),
        "return_routed_experts": ((False,), "experts are not returned; leave it out"),
        "lora_path": (([],), "adapters cannot be loaded; merge the adapter into the model"),
        "session_params": ((), "send the whole prompt; a shared prefix is not computed again"),
        "custom_logit_processor": ((), "logits cannot be changed; leave it out"),
        "input_embeds": ((), _TEXT_ONLY),
        "image_data": (([],), _TEXT_ONLY),
        "audio_data": (([],), _TEXT_ONLY),
        "video_data": (([],), _TEXT_ONLY),
        "modalities": (([],), _TEXT_ONLY),
    }
    ignored = ("log_metrics", "background", "no_logs")

    text: str | Many[str] | None = None
    input_ids: Many[int] | Many[Many[int]] | None = None
    sampling_params: dict[str, Any] | Many[dict[str, Any]] | None = Field(
        None, description="As of forerun.SamplingParams; one for all prompts, or one per prompt"
    )
    rid: str | Many[str] | None = Field(None, description="Request id, for /abort_request")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Each for all prompts, or one per prompt; `LogprobParams` describes them.
    return_logprob: bool | Many[bool | None] | None = None
    logprob_start_len: int | Many[int | None] | None = None
    top_logprobs_num: int | Many[int | None] | None = None
    token_ids_logprob: Many[int] | Many[Many[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_token_texts: bool | None = Field(
        None, description="Adds token_texts: the part of the text that each token completed"
    )

    @property
    def single(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, str)
        return not (self.input_ids and isinstance(self.input_ids[0], list))


def native_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/generate", responses=DOCUMENTED_STREAM)
    @router.put("/generate", responses=DOCUMENTED_STREAM)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Completes one prompt or many, as SGLang's native API does."""
        service.check_open()
        form = _Format.of(service, body)
        call = await _start(service, body)
        single = body.single and len(call.generations) == 1
        if body.stream:
            return EventStream(_events(service, call, form, single), call.close)
        return await until_disconnect(request.receive, _whole(service, call, form, single))

    return router


async def _start(service: Service, body: GenerateRequest) -> Call:
    ids = await _prompt_ids(service, body)
    params = _params(body.sampling_params, len(ids))
    asked = {name: value for name, value in body if name in LOGPROB_KEYWORDS}
    logprobs = logprob_params(asked, len(ids), body.single)
    rids = [body.rid] if isinstance(body.rid, str) else body.rid
    if rids is not None and len(rids) != len(ids):
        raise RequestError(f"{len(rids)} rids for {len(ids)} prompts; give one per prompt.")
    prompts = [
        Prompt(prompt, p, p.n, rids[at] if rids else None, asked, body.scheduling)
        for at, (prompt, p, asked) in enumerate(zip(ids, params, logprobs, strict=True))
    ]
    return await service.start(prompts, bool(body.stream))


async def _prompt_ids(service: Service, body: GenerateRequest) -> list[list[int]]:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("Give either text or input_ids, not both or neither.")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        service.check_size(texts)
        ids = await service.text.encode(texts, service.max_prompt_tokens)
    else:
        ids, _ = token_lists(body.input_ids)
        service.check_size(ids)
    if not ids:
        raise RequestError("The list of prompts is empty; give at least one.")
    return ids


def _params(
    given: Mapping[str, Any] | Many[dict[str, Any]] | None, count: int
) -> list[SamplingParams]:
    if isinstance(given, list):
        if len(given) != count:
            raise RequestError(
                f"{len(given)} sampling_params for {count} prompts; give one, or one per prompt."
            )
        return [_one(params) for params in given]
    return [_one(given or {})] * count


# Of SGLang's parameters those that are not here, with values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "custom_params": (),
    "stop_regex": (),
    "no_stop_trim": (False,),
    "spaces_between_special_tokens": (True,),
}


def _one(given: Mapping[str, Any]) -> SamplingParams:
    kept = {
        name: value
        for name, value in given.items()
        if value is not None and not (name in _NEUTRAL and value in _NEUTRAL[name])
    }
    return SamplingParams.of(kept)


@dataclass(frozen=True)
class _Format:
    """What the answers of a request hold."""

    token_bytes: TokenBytes | None  # log-probabilities with texts
    token_texts: bool

    @classmethod
    def of(cls, service: Service, body: GenerateRequest) -> _Format:
        """
        Raises:
            RequestError: texts are asked for, and there is no tokenizer.
        """
        if body.return_token_texts and service.text.tokenizer is None:
            raise RequestError("return_token_texts needs a tokenizer; leave it out.")
        token_bytes = service.text.token_bytes() if body.return_text_in_logprobs else None
        return cls(token_bytes, bool(body.return_token_texts))

    def answer(self, generation: Generation, output: RequestOutput) -> dict[str, Any]:
        info, token_bytes = output.meta_info, self.token_bytes
        answer: dict[str, Any] = {
            "text": output.text,
            "output_ids": output.output_ids,
            "meta_info": info if token_bytes is None else with_texts(info, token_bytes),
        }
        if self.token_texts:
            answer["token_texts"] = generation.token_texts(output)
        return answer


async def _whole(service: Service, call: Call, form: _Format, single: bool) -> Response:
    outputs = await service.outputs(call)

    def respond() -> Response:
        answers = list(map(form.answer, call.generations, outputs))
        return json_response(answers[0] if single else answers)

    # In a thread: texts and log-probabilities of tokens may take a while.
    return await service.text.run(respond)


async def _events(
    service: Service, call: Call, form: _Format, single: bool
) -> AsyncGenerator[bytes, None]:
    """Text and ids of every event are all there are so far."""
    indices = {generation: None if single else at for at, generation in enumerate(call.generations)}
    async for taken in call.parts():
        events = []
        for generation, _ in taken:
            write = partial(_event, form, generation, generation.output_so_far())
            # With log-probabilities in a thread, as above; others' streams go on.
            scored = generation.record.logprobs is not None
            index = indices[generation]
            events.append(await service.text.run(partial(write, index)) if scored else write(index))
        yield b"".join(events)
    yield DONE


def _event(
    form: _Format, generation: Generation, output: Callable[[], RequestOutput], index: int | None
) -> bytes:
    """`index`: of the generation, where there are several."""
    answer = form.answer(generation, output())
    return event(answer if index is None else {**answer, "index": index})
