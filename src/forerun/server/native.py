"""`/generate`, with SGLang's requests and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
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
from forerun.server.errors import json_response
from forerun.server.generation import Call
from forerun.server.logprobs import with_texts
from forerun.server.openai_protocol import StreamOptions, StrictModel, Unsupported
from forerun.server.service import Prompt, Service
from forerun.server.sse import DONE, EventStream, event, until_disconnect

_TEXT_ONLY = "the input is text or token ids only"


class GenerateRequest(StrictModel):
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
        "priority": ((), "requests run in the order of their arrival; leave it out"),
    }
    ignored = ("log_metrics", "background", "no_logs")

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = Field(
        None, description="As of forerun.SamplingParams; one for all prompts, or one per prompt"
    )
    rid: str | list[str] | None = Field(None, description="Request id, for /abort_request")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Each for all prompts, or one per prompt; `LogprobParams` describes them.
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[int] | list[list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None

    @property
    def single(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, str)
        return not (self.input_ids and isinstance(self.input_ids[0], list))


def native_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    @router.put("/generate", include_in_schema=False)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Completes one prompt or many, as SGLang's native API does."""
        service.check_open()
        spell = service.text.token_bytes() if body.return_text_in_logprobs else None
        call = await _start(service, body)
        single = body.single and len(call.generations) == 1
        if body.stream:
            return EventStream(_events(service, call, single, spell), call.close)
        return await until_disconnect(request.receive, _whole(service, call, single, spell))

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
        Prompt(prompt, p, p.n, rids[at] if rids else None, asked)
        for at, (prompt, p, asked) in enumerate(zip(ids, params, logprobs, strict=True))
    ]
    return await service.start(prompts, bool(body.stream))


async def _prompt_ids(service: Service, body: GenerateRequest) -> list[list[int]]:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("Give either text or input_ids, not both or neither.")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        ids = await service.text.encode(texts, service.max_prompt_tokens)
    else:
        ids, _ = token_lists(body.input_ids)
    if not ids:
        raise RequestError("The list of prompts is empty; give at least one.")
    return ids


def _params(
    given: Mapping[str, Any] | list[dict[str, Any]] | None, count: int
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


def _answer(output: RequestOutput, spell: TokenBytes | None) -> dict[str, Any]:
    """`spell`: log-probabilities have texts."""
    info = output.meta_info
    return {
        "text": output.text,
        "output_ids": output.output_ids,
        "meta_info": info if spell is None else with_texts(info, spell),
    }


async def _whole(service: Service, call: Call, single: bool, spell: TokenBytes | None) -> Response:
    outputs = await service.outputs(call)

    def respond() -> Response:
        answers = [_answer(output, spell) for output in outputs]
        return json_response(answers[0] if single else answers)

    return await service.text.run(respond)


async def _events(
    service: Service, call: Call, single: bool, spell: TokenBytes | None
) -> AsyncGenerator[bytes, None]:
    """Text and ids of every event are all there are so far."""
    places = {generation: at for at, generation in enumerate(call.generations)}
    async for taken in call.parts():
        events = []
        for generation, _ in taken:
            index = None if single else places[generation]
            make = partial(_event, generation.output_so_far(), spell, index)
            # Writing many log-probabilities takes a while: others' streams go on.
            scored = generation.record.logprobs is not None
            events.append(await service.text.run(make) if scored else make())
        yield b"".join(events)
    yield DONE


def _event(make: Callable[[], RequestOutput], spell: TokenBytes | None, index: int | None) -> bytes:
    """`index`: of the generation, where there are several."""
    answer = _answer(make(), spell)
    return event(answer if index is None else {**answer, "index": index})
