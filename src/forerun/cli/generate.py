"""`forerun generate`: completes one prompt or many."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import Values, engine_flags, sampling_flags, with_flags
from forerun.cli.output import dim, fail_if_aborted, print_json, print_stream, shown, summary
from forerun.core.errors import RequestError
from forerun.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM, RequestOutput

Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, or messages


@with_flags(engine=engine_flags, sampling=sampling_flags)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT...|-]", help="Text; -: standard input")
    ] = None,
    *,
    input_ids: Annotated[
        list[str] | None,
        typer.Option("--input-ids", help="A prompt as token ids, '1,2,3'; may be repeated"),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are user messages, not raw text")
    ] = False,
    system: Annotated[
        str | None, typer.Option("--system", help="System message before it (with --chat)")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per completion")] = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Run all prompts as one batch and print at the end")
    ] = False,
    engine: Values,
    sampling: Values,
) -> None:
    """Completes each prompt. Text goes to standard output, statistics to standard error."""
    params = SamplingParams.of(sampling)
    requests = _requests(prompts or [], input_ids or [], chat, system)
    from forerun.llm import LLM  # slow import, after the checks above

    with LLM(**engine) as llm:
        started = time.perf_counter()
        if json or no_stream:
            outputs = _batch(llm, requests, params)
            for prompt, output in outputs:
                if json:
                    print_json({"prompt": prompt, **as_dict(output)})
                else:
                    print(shown(output))
        else:
            outputs = [
                (prompt, output) for prompt in requests for output in _streamed(llm, prompt, params)
            ]
        seconds = time.perf_counter() - started
        if not json:
            dim(summary([output for _, output in outputs], seconds))
        fail_if_aborted(output for _, output in outputs)


def as_dict(output: RequestOutput) -> dict[str, Any]:
    """An output as the JSON of `--json`."""
    return {
        "index": output.index,
        "text": output.text,
        "output_ids": list(output.output_ids),
        "finish_reason": output.finish_reason,
        "meta_info": output.meta_info,
    }


def _requests(
    prompts: list[str], input_ids: list[str], chat: bool, system: str | None
) -> list[Prompt]:
    if prompts.count("-") > 1:
        raise RequestError("standard input ('-') can be one prompt only.")
    if not prompts and not input_ids:
        raise RequestError('no prompt. Give text ("..."), - for standard input, or --input-ids.')
    if system is not None and not chat:
        raise RequestError("--system needs --chat.")
    if chat and input_ids:
        raise RequestError("--chat takes text, not --input-ids.")
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if not chat:
        return [*texts, *map(_parse_ids, input_ids)]
    head = [{"role": "system", "content": system}] if system is not None else []
    return [[*head, {"role": "user", "content": text}] for text in texts]


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(f"--input-ids must be integers, '1,2,3', got {text!r}.") from None


def _is_messages(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _generate(llm: LLM, prompts: Any, params: SamplingParams, like: Prompt, stream: bool) -> Any:
    """Calls the method of `LLM` for prompts of the type of `like`."""
    if isinstance(like, str):
        return llm.generate(prompts, params, stream=stream)
    if _is_messages(like):
        return llm.chat(prompts, params, stream=stream)
    return llm.generate(input_ids=prompts, sampling_params=params, stream=stream)


def _batch(
    llm: LLM, requests: list[Prompt], params: SamplingParams
) -> list[tuple[Prompt, RequestOutput]]:
    """All requests of a kind in one call, in the order given (text before token ids)."""
    pairs: list[tuple[Prompt, RequestOutput]] = []
    for kind in (str, list):
        group = [request for request in requests if isinstance(request, kind)]
        if group:
            outputs = _generate(llm, group, params, group[0], stream=False)
            owners = [request for request in group for _ in range(params.n)]
            pairs += zip(owners, outputs, strict=True)
    return pairs


def _streamed(llm: LLM, prompt: Prompt, params: SamplingParams) -> list[RequestOutput]:
    """One prompt. Several completions (n > 1) are printed when they are done."""
    if params.n > 1:
        outputs = _generate(llm, prompt, params, prompt, stream=False)
        for output in outputs:
            print(shown(output))
        return list(outputs)
    last = print_stream(_generate(llm, prompt, params, prompt, stream=True))
    return [last] if last is not None else []
