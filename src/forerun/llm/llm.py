"""The Python API: `from forerun import LLM, SamplingParams`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError, RequestError
from forerun.core.request import Request, State
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun.llm.bundled import bundled
from forerun.llm.hub import with_local_paths
from forerun.llm.output import RequestOutput, make_output
from forerun.speculative.registry import all_options, get_algorithm

Params = SamplingParams | Mapping[str, Any]
Message = Mapping[str, str]


class LLM:
    """A model, ready to generate.

    Every command-line flag is a keyword (`--page-size 64` is `page_size=64`). A model path is a
    local folder, or `org/name[@revision]` on the Hugging Face Hub (a `Path` is always local).
    Without a `model_path` the bundled target is used, and with an algorithm its bundled draft.

    Raises:
        ConfigError: settings, checkpoint or draft cannot work; the message says the fix.
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        overlap_depth: int | None = None,
        **settings: Any,
    ) -> None:
        """`overlap_depth` (0, 1) overrides what suits the device; for tests."""
        options = {option.name: option.default for option in all_options()}
        settings["model_path"] = model_path
        for name, value in settings.items():
            if isinstance(value, Path):
                settings[name] = str(value.expanduser().absolute())
        config = EngineConfig.of(settings, options)
        logging.getLogger("forerun").setLevel(config.log_level.upper())
        get_algorithm(config.speculative_algorithm)  # must exist, before anything is downloaded
        self.config, target = _with_bundled(with_local_paths(config))
        self.tokenizer = None if config.skip_tokenizer_init else _tokenizer(self.config, target)
        self.engine = Engine(self.config, target, self.tokenizer, overlap_depth=overlap_depth)

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
        """Ends what still runs."""
        for request in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            self.engine.abort(request.rid, "the engine was closed")
        while self.engine.has_work:
            self.engine.step()
        self.engine.close()

    def explain(self) -> dict[str, Any]:
        """What was chosen at start (device, dtype, backends with reasons, pools)."""
        return self.engine.explain()

    def stats(self) -> dict[str, Any]:
        """What the drafts were worth so far: counters since the start, and the choice of widths."""
        return self.engine.stats()

    # --- generation -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
    ) -> Any:
        """Completes one prompt or many, given as text or as token ids.

        One prompt with n = 1 gives a `RequestOutput`, otherwise a list in the order of the prompts
        (the n samples of a prompt side by side). With `stream`, an iterator of growing outputs.

        Raises:
            RequestError: a prompt or parameter cannot be served; nothing of the call was started.
        """
        ids, single = self._prompt_ids(prompts, input_ids)
        return self._run(ids, single, sampling_params, stream)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        stream: bool = False,
    ) -> Any:
        """Answers one conversation or many, `[{"role": ..., "content": ...}, ...]`."""
        import jinja2  # what transformers renders templates with

        tokenizer = self._need_tokenizer("chat")
        if not messages:
            raise RequestError("messages is empty; give at least one message.")
        single = isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        ids = []
        for conversation in conversations:
            for message in conversation:
                if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                    raise RequestError(f"A message needs 'role' and 'content', got {message!r}.")
            try:
                text = tokenizer.apply_chat_template(
                    list(conversation), add_generation_prompt=True, tokenize=False
                )
            except (ValueError, jinja2.TemplateError) as error:  # none there, or it refuses
                reason = str(error).splitlines()[0]
                raise RequestError(
                    f"The chat template does not take these messages: {reason} Use generate for"
                    " plain text."
                ) from error
            ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._run(ids, single, sampling_params, stream)

    # --- inside ---------------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[list[int]],
        single: bool,
        sampling_params: Params | Sequence[Params] | None,
        stream: bool,
    ) -> Any:
        params = _params_per_prompt(sampling_params, len(prompts))
        # All are checked before any is queued: a list is refused as a whole.
        jobs = [
            _Job(self.engine.make_request(list(ids), p, seed_offset=index), at, index)
            for at, (ids, p) in enumerate(zip(prompts, params, strict=True))
            for index in range(p.n)
        ]
        if stream:
            return self._stream(jobs)
        outputs = {o.meta_info["id"]: o for o in self._stream(jobs, partial=False)}
        ordered = [outputs[job.request.rid] for job in jobs]
        return ordered[0] if single and len(ordered) == 1 else ordered

    def _stream(self, jobs: list[_Job], partial: bool = True) -> Iterator[RequestOutput]:
        """Steps the engine until the jobs are done. Others' requests run along, and may have been
        run by others: so the requests are looked at, not what a step returns."""
        open_jobs = {job.request.rid: job for job in jobs}
        try:
            for job in jobs:
                self.engine.submit(job.request)
            while open_jobs:
                self.engine.step()
                for job in list(open_jobs.values()):
                    request = job.request
                    if request.state is State.FINISHED:
                        del open_jobs[request.rid]
                        yield job.output(self.engine.close_request(request))
                    elif partial and len(request.output) > job.given:
                        job.given = len(request.output)
                        yield job.output(self.engine.text(request))
        finally:  # the caller left the stream, or a step failed: nothing stays behind
            for job in open_jobs.values():
                self.engine.abort(job.request.rid)
                self.engine.close_request(job.request)

    def _prompt_ids(
        self,
        prompts: str | Sequence[str] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    ) -> tuple[list[list[int]], bool]:
        if (prompts is None) == (input_ids is None):
            raise RequestError("Give either prompts (text) or input_ids, not both or neither.")
        if input_ids is not None:
            single = not input_ids or isinstance(input_ids[0], int)
            lists: Any = [input_ids] if single else input_ids
            return [list(ids) for ids in lists], single
        tokenizer = self._need_tokenizer("text prompts")
        assert prompts is not None
        single = isinstance(prompts, str)
        texts: Sequence[str] = [prompts] if isinstance(prompts, str) else prompts
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(f"A prompt must be text, got {type(text).__name__}.")
        return [tokenizer(text)["input_ids"] for text in texts], single

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"skip_tokenizer_init is set, so {what} cannot be used; pass input_ids."
            )
        return self.tokenizer


@dataclass
class _Job:
    """A request of one call: sample `index` of prompt `prompt_index`."""

    request: Request
    prompt_index: int
    index: int
    given: int = 0  # tokens the caller has seen

    def output(self, text: str) -> RequestOutput:
        return make_output(self.request, text, self.prompt_index, self.index)


def _params_per_prompt(given: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    if isinstance(given, Sequence):
        if len(given) != count:
            raise RequestError(
                f"{len(given)} sampling_params for {count} prompts; give one, or one a prompt."
            )
        return [SamplingParams.of(p) for p in given]
    return [SamplingParams.of(given)] * count


def _with_bundled(config: EngineConfig) -> tuple[EngineConfig, Path]:
    """Fills in the bundled target, and beside it the algorithm's bundled draft."""
    if config.model_path is not None:
        return config, Path(config.model_path)
    target = bundled("target")
    draft = get_algorithm(config.speculative_algorithm).bundled_draft
    if draft is not None and config.speculative_draft_model_path is None:
        config = replace(config, speculative_draft_model_path=str(bundled(draft)))
    return config, target


def _tokenizer(config: EngineConfig, target: Path) -> Any:
    from transformers import AutoTokenizer

    folder = Path(config.tokenizer_path) if config.tokenizer_path else target
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"No tokenizer loads from {folder}: {reason} Set tokenizer_path, or skip_tokenizer_init"
            " to work on token ids."
        ) from error
