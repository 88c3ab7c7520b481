"""The server's application with a scripted engine: what it generates is given by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from fastapi import FastAPI
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun.config.engine_config import EngineConfig
from forerun.core.executor import ExecutorInfo
from forerun.core.grammar import Grammar
from forerun.core.logprobs import TokenLogprobs
from forerun.core.plan import Limits
from forerun.core.request import FinishReason
from forerun.core.sampling_params import SamplingParams
from forerun.engine.requests import RequestFactory
from forerun.server.app import build_app
from forerun.server.engines.messages import Advance
from forerun.server.engines.metrics import ServerMetrics
from forerun.server.generation import Call, Generation
from forerun.server.prompt import Prompt
from forerun.server.service import Service
from forerun.server.settings import ServerSettings
from forerun.server.text import TextService

EOS = "<|im_end|>"
CONTEXT = 1 << 18


def tokenizer(template: str, tokens: Sequence[str] = (), special: Sequence[str] = ()) -> Any:
    """One token per byte, and `tokens`; `special` ones are left out of texts."""
    bytes_ = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=bytes_, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in (EOS, *special)])
    made.add_tokens([AddedToken(t, special=False) for t in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=EOS,
        extra_special_tokens=list(special),
        chat_template=template,
    )


class ScriptedEngine:
    """In place of `Replicas`. Each generation gets the next script, a few tokens a step."""

    def __init__(self, text: TextService, scripts: Sequence[str], step: int) -> None:
        self.config = EngineConfig()
        self.model_path = Path("scripted")
        vocabulary = text.tokenizer.get_vocab()
        self._eos = vocabulary[EOS]
        limits = Limits(
            slots=8,
            page_size=16,
            max_verify_tokens=1,
            kv_reserve=1,
            chunked_prefill_size=CONTEXT,
            context_length=CONTEXT,
            overlap_depth=0,
        )
        self.info = ExecutorInfo(
            limits=limits,
            num_pages=1 + 8 * CONTEXT // 16,
            num_snapshots=None,
            vocab_size=len(vocabulary),
            eos_token_ids=(self._eos,),
            prefix_lookahead=0,
            verify_widths=(1,),
        )
        self.factory = RequestFactory(self.info, random_seed=0)
        self.metrics = ServerMetrics()
        self.num_requests = 0
        self.prompts: list[str] = []  # in the chat template
        self.params: list[SamplingParams] = []
        self.tenants: list[int] = []
        self.grammars: list[Grammar] = []  # that were compiled; scripts may not follow them
        self._text, self._scripts, self._step = text, list(scripts), step
        self._tasks: list[asyncio.Task[None]] = []

    def is_known(self, rid: str) -> bool:
        return False

    def abort(self, rids: Sequence[str]) -> None:
        raise AssertionError(f"{rids} are aborted")

    is_ready = True

    @property
    def slots(self) -> int:
        return self.info.limits.slots

    def place(self, prompts: Sequence[Prompt]) -> list[tuple[int, int]]:
        return [(0, len(prompt.ids)) for prompt in prompts]

    async def compile_grammar(self, grammar: Grammar, replica: int, client: str = "") -> None:
        self.grammars.append(grammar)

    def submit(self, call: Call) -> None:
        for generation in call.generations:
            ids = list(generation.record.prompt)
            self.params.append(generation.params)
            self.tenants.append(generation.scheduling.tenant)
            self.prompts.append(self._text.tokenizer.decode(ids))
            running = self._run(call, generation, self._scripts.pop(0))
            self._tasks.append(asyncio.ensure_future(running))

    async def _run(self, call: Call, generation: Generation, text: str) -> None:
        script = self._text.tokenizer(text, add_special_tokens=False)["input_ids"]
        script.append(self._eos)
        limit = generation.params.max_new_tokens
        tokens = script[:limit]
        for at in range(0, len(tokens), self._step):
            new = tokens[at : at + self._step]
            finish = None
            if at + len(new) == len(tokens):
                length = FinishReason("length", length=len(tokens))
                stop = FinishReason("stop", matched=self._eos)
                finish = stop if tokens[-1] == self._eos else length
            scored = generation.record.logprobs is not None
            logprobs = [TokenLogprobs(-1.0 - at - i) for i in range(len(new) if scored else 0)]
            generation.apply(Advance(generation.rid, new, [], [], 0, 0, finish, logprobs))
            call.notify(ended=finish is not None)
            await asyncio.sleep(0)


class Scripted:
    """Clients of an application whose answers are `scripts`, in order."""

    def __init__(self, made: Any, *scripts: str, step: int = 1, **settings: Any) -> None:
        self._text = TextService(made)
        self.engine = self._new_engine(scripts, step)
        service = Service(ServerSettings(**settings), self.engine, self._text)  # type: ignore[arg-type]
        self.service = service
        with patch.object(FastAPI, "openapi"):  # it is made when it is asked for
            self.app = build_app(service)
        transport = httpx.ASGITransport(self.app)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        self._client = AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=self._http, max_retries=0
        )

    def _new_engine(self, scripts: Sequence[str], step: int) -> ScriptedEngine:
        return ScriptedEngine(self._text, scripts, step)

    def run(self, use: Callable[[AsyncOpenAI], Any]) -> Any:
        """The value of a coroutine that uses the client."""

        async def used() -> Any:
            async with self._http:
                return await use(self._client)

        try:
            return asyncio.run(used())
        finally:
            self._text.close()

    def chat(self, **body: Any) -> Any:
        """An answer, or all chunks of a stream."""
        return self.run(lambda client: _call(client.chat.completions.create, body))

    def chats(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """The same for several, one after the other."""

        async def all_of(client: AsyncOpenAI) -> list[Any]:
            return [await _call(client.chat.completions.create, body) for body in bodies]

        answers: list[Any] = self.run(all_of)
        return answers

    def respond(self, **body: Any) -> Any:
        """A response, or all events of a stream."""
        return self.run(lambda client: _call(client.responses.create, body))

    def post(self, path: str, body: bytes, **more: str) -> httpx.Response:
        """The answer to a body as it is."""

        async def posted(client: AsyncOpenAI) -> httpx.Response:
            headers = {"Content-Type": "application/json", **more}
            return await self._http.post(path, content=body, headers=headers)

        return self.run(posted)


async def _call(create: Callable[..., Any], body: dict[str, Any]) -> Any:
    answer = await create(model="bundled", **body)
    return [piece async for piece in answer] if body.get("stream") else answer
