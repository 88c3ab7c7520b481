"""The Python API: `from forerun import LLM, SamplingParams`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from forerun.core.checks import boolean
from forerun.core.errors import RequestError, nearest, shown
from forerun.core.logprobs import LogprobParams
from forerun.core.pooling import Pooling
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.core.scheduling_params import SCHEDULING_KEYWORDS, SchedulingParams
from forerun.core.unsupported import refusal
from forerun.engine.engine import Engine
from forerun.executor.start import start_executor
from forerun.llm.logprobs import LOGPROB_KEYWORDS, logprob_params
from forerun.llm.loop import Call, EngineLoop, Job
from forerun.llm.output import EmbeddingOutput, meta_info
from forerun.llm.pooling import NO_TEXT, Embedder, PoolingParams, most_tokens
from forerun.llm.prompts import Ending, chat_ids, text_ids, text_list, token_lists
from forerun.llm.scheduling import scheduling_params
from forerun.llm.scoring import Pair, make_scorer, paired
from forerun.llm.setup import checked_config, load_tokenizer, with_models
from forerun.llm.stream import OutputStream
from forerun.llm.text import OutputText

Params = SamplingParams | Mapping[str, Any]
Message = Mapping[str, Any]


class _Prompt(NamedTuple):
    ids: list[int]
    params: SamplingParams
    logprobs: LogprobParams | None
    scheduling: SchedulingParams
    pooling: Pooling | None = None


class LLM:
    """A loaded model that generates text.

    Every command-line flag is a keyword (`--page-size 64` is `page_size=64`). A model path is a
    local folder, or `org/name[@revision]` on the Hugging Face Hub (a `Path` is always local).
    Without a `model_path` the bundled target is used, and with an algorithm its bundled draft.

    Thread-safe: requests of all threads run in one batch.

    With `nnodes` the same script runs on every node. On others than node 0 this is where it ends:
    the constructor hosts the node's ranks until the `LLM` on node 0 is closed.

    Raises:
        ConfigError: invalid settings, checkpoint or draft; the message says how to fix it.
        ExecutorError: with `node_rank` above 0: the engine has failed, or node 0 is gone.
        SystemExit: with `node_rank` above 0: the `LLM` on node 0 is closed.
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        overlap_depth: int | None = None,
        **settings: Any,
    ) -> None:
        """`overlap_depth`: 0 or 1 instead of the device's default; for tests."""
        self.config, target = with_models(checked_config({**settings, "model_path": model_path}))
        if self.config.node_rank > 0:
            from forerun.executor.ranks.host import host_ranks

            host_ranks(self.config, target)
            raise SystemExit(0)
        self.tokenizer = load_tokenizer(self.config, target)
        self._embedder = Embedder.of(self.config, target, self.tokenizer)
        executor = start_executor(self.config, target, overlap_depth)
        # Benchmarks and tests may step it while no call runs.
        self.engine = Engine(self.config, executor)
        self._loop = EngineLoop(self.engine)
        # Called by `close`, by the garbage collector, or when Python exits.
        self._finalizer = weakref.finalize(self, self._loop.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Aborts running requests and closes the engine; further calls do nothing."""
        self._finalizer()

    def explain(self) -> dict[str, Any]:
        """Choices made at start: device, dtype, attention backends with reasons, pool sizes."""
        return self.engine.explain()

    def stats(self) -> dict[str, Any]:
        """Counters of speculation since the start, and the state of the width policy.

        Raises:
            EngineClosedError: after `close`.
        """
        return self._loop.do(self.engine.stats)

    # --- generation -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """Completes one prompt or many, given as text or as token ids.

        Args:
            sampling_params: for all prompts, or one per prompt.
            options: `return_logprob`, `logprob_start_len`, `top_logprobs_num` and
                `token_ids_logprob` as in SGLang, each for all prompts or one per prompt;
                `LogprobParams` describes them. The values are in `meta_info`.
                `priority`, `queue_timeout`, `request_timeout` and `tenant`, likewise;
                `SchedulingParams` describes them.

        Returns:
            A `RequestOutput` for one prompt with n = 1; otherwise a list in the order of the
            prompts, the n samples of a prompt next to each other. With `stream`, an iterator of
            partial outputs (`OutputStream`), which starts the requests.

        Raises:
            RequestError: a prompt or parameter is invalid; no request of the call was started.
            EngineClosedError: after `close`.
        """
        _refuse(options, "generate")
        self._loop.check_open()
        if (prompts is None) == (input_ids is None):
            raise RequestError("Give either prompts (text) or input_ids, not both or neither.")
        if input_ids is not None:
            ids, single = token_lists(input_ids)
        else:
            ids, single = text_ids(self._need_tokenizer("text prompts"), prompts)
        return self._run(ids, single, sampling_params, stream, options)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """Answers one conversation or many, `[{"role": ..., "content": ...}, ...]`.

        Content is text, or a list of text parts, `[{"type": "text", "text": ...}, ...]`. `tools`
        are functions that may be called, in OpenAI's form; calls are text, as the model wrote them.
        `chat_template_kwargs` are variables of the model's chat template, for example
        `{"enable_thinking": False}`. Takes `options`, returns and raises as `generate` does.

        With `add_generation_prompt=False` the prompt ends with the last message; with
        `continue_final_message` the answer goes on with its text (both as in vLLM).
        """
        _refuse(options, "chat")
        self._loop.check_open()
        ending = Ending.of(add_generation_prompt, continue_final_message)
        tokenizer = self._need_tokenizer("chat")
        ids, single = chat_ids(tokenizer, messages, chat_template_kwargs, tools, ending=ending)
        return self._run(ids, single, sampling_params, stream, options)

    # --- embeddings and scores ------------------------------------------------------------------

    def embed(
        self,
        prompts: str | Sequence[str] | None = None,
        pooling_params: PoolingParams | Mapping[str, Any] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> Any:
        """Turns one prompt or many, given as text or as token ids, into a vector each.

        Texts get the special tokens that the tokenizer adds, token ids are taken as they are.

        Args:
            pooling_params: which vector; default: as the model's folder says.
            truncate_prompt_tokens: longer prompts are shortened to this many tokens, as in vLLM;
                -1: to the context length.
            options: `priority`, `queue_timeout`, `request_timeout` and `tenant`, each for all
                prompts or one per prompt; `SchedulingParams` describes them.

        Returns:
            An `EmbeddingOutput` for one prompt, else a list in the order of the prompts.

        Raises:
            RequestError: a prompt or parameter is invalid, or a request was aborted.
            EngineClosedError: after `close`.
        """
        _refuse_all_but(SCHEDULING_KEYWORDS, options, "embed")
        self._loop.check_open()
        if (prompts is None) == (input_ids is None):
            raise RequestError("Give either prompts (text) or input_ids, not both or neither.")
        pooling = self._embedder.resolve(PoolingParams.of(pooling_params), self.engine.info)
        at_most = most_tokens(truncate_prompt_tokens, self.engine.limits.context_length)
        if input_ids is not None:
            ids, single = token_lists(input_ids)
            ids = [each[:at_most] for each in ids]
        else:
            self._need_tokenizer("text prompts")
            texts, single = text_list(prompts)
            ids = self._embedder.text_ids(texts, at_most)
        scheduling = scheduling_params(options, len(ids))
        asked = [
            _Prompt(prompt, NO_TEXT, None, when, pooling.pooling)
            for prompt, when in zip(ids, scheduling, strict=True)
        ]
        outputs = [
            EmbeddingOutput(
                pooling.vector(request).tolist(), list(request.prompt), meta_info(request), at
            )
            for at, request in enumerate(self._ended(asked))
        ]
        return outputs[0] if single else outputs

    encode = embed  # vLLM's and SGLang's other name

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruct: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> Any:
        """Scores pairs of texts: a query with a document, or one query with many documents.

        How is the setting `score_type`. Takes `truncate_prompt_tokens` and `options`, and raises as
        `embed` does.

        Args:
            data_1: the query, or one per document.
            instruct: what documents are looked for, in the prompt of `score_type` yes_no.

        Returns:
            A float for two texts, else a list of them, one per document.
        """
        _refuse_all_but(SCHEDULING_KEYWORDS, options, "score")
        self._loop.check_open()
        at_most = most_tokens(truncate_prompt_tokens, self.engine.limits.context_length)
        (queries, _), (documents, single) = text_list(data_1), text_list(data_2)
        pairs = [Pair(*each) for each in paired(queries, documents)]
        info, tokenizer = self.engine.info, self._need_tokenizer("scores")
        run = make_scorer(self.config.score_type, self._embedder, tokenizer, info).run(
            pairs, at_most, instruct
        )
        scheduling = scheduling_params(options, len(run.prompts))
        asked = [
            _Prompt(ids, params, logprobs, when, pooling)
            for (ids, params, logprobs, pooling), when in zip(run.prompts, scheduling, strict=True)
        ]
        scores = run.scores(self._ended(asked))
        return scores[0] if single else scores

    # --- inside ---------------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[list[int]],
        single: bool,
        sampling_params: Params | Sequence[Params] | None,
        stream: bool,
        options: Mapping[str, Any],
    ) -> Any:
        params = _params_per_prompt(sampling_params, len(prompts))
        logprobs = logprob_params(options, len(prompts), single)
        scheduling = scheduling_params(options, len(prompts))
        boolean("stream", stream, RequestError)
        asked = map(_Prompt, prompts, params, logprobs, scheduling)
        # All are checked before any is queued: a list is refused as a whole.
        jobs = [
            self._job(prompt, at, index, stream)
            for at, prompt in enumerate(asked)
            for index in range(prompt.params.n)
        ]
        outputs = OutputStream(self._loop, Call(jobs, partial=stream), self.tokenizer, owner=self)
        if stream:
            return outputs
        try:
            ended = {output.meta_info["id"]: output for output in outputs}
        finally:
            outputs.close()
        ordered = [ended[job.request.rid] for job in jobs]
        return ordered[0] if single and len(ordered) == 1 else ordered

    def _ended(self, prompts: Sequence[_Prompt]) -> list[Request]:
        """Runs the prompts, all or none, to their ends.

        Raises:
            RequestError: one cannot be served, or was aborted.
        """
        jobs = [self._job(prompt, at, 0, stream=False) for at, prompt in enumerate(prompts)]
        outputs = OutputStream(self._loop, Call(jobs, partial=False), None, owner=self)
        try:
            for output in outputs:
                if output.error is not None:
                    raise RequestError(f"Prompt {output.prompt_index}: {output.error}")
        finally:
            outputs.close()
        return [job.request for job in jobs]

    def _job(self, prompt: _Prompt, prompt_index: int, index: int, stream: bool) -> Job:
        ids, params, logprobs, scheduling, pooling = prompt
        if params.stop and self.tokenizer is None:
            raise RequestError("Stop strings need a tokenizer; use stop_token_ids instead.")
        request = self.engine.make_request(
            ids,
            params,
            seed_offset=index,
            logprobs=logprobs,
            scheduling=scheduling,
            pooling=pooling,
        )
        text = None
        if self.tokenizer is not None and (stream or params.stop):
            text = OutputText(self.tokenizer, params)
        return Job(request, prompt_index, index, text)

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"skip_tokenizer_init is set, so {what} cannot be used; pass input_ids."
            )
        return self.tokenizer


def _params_per_prompt(given: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    if isinstance(given, Sequence):
        if len(given) != count:
            raise RequestError(
                f"{len(given)} sampling_params for {count} prompts; give one, or one per prompt."
            )
        return [SamplingParams.of(p) for p in given]
    return [SamplingParams.of(given)] * count


def _refuse(keywords: Mapping[str, Any], call: str) -> None:
    """Raises RequestError for the first keyword that `generate` and `chat` do not have."""
    own = [f.name for f in fields(SamplingParams)]
    for name in keywords:
        if name in (*LOGPROB_KEYWORDS, *SCHEDULING_KEYWORDS):
            continue
        if name in own:
            raise RequestError(
                f"{name} is a sampling parameter: sampling_params={{{name!r}: ...}}."
            )
        raise RequestError(
            refusal(name)
            or f"{call} has no keyword {shown(name)}.{nearest(name, [*own, *_KEYWORDS])}"
        )


def _refuse_all_but(known: Sequence[str], keywords: Mapping[str, Any], call: str) -> None:
    for name in keywords:
        if name not in known:
            raise RequestError(f"{call} has no keyword {shown(name)}.{nearest(name, known)}")


_KEYWORDS = (
    "prompts", "messages", "sampling_params", "input_ids", "chat_template_kwargs", "stream",
    "tools", "add_generation_prompt", "continue_final_message", *LOGPROB_KEYWORDS,
    *SCHEDULING_KEYWORDS,
)  # fmt: skip
