"""Log-probabilities in the Python API: keywords in, entries of `meta_info` out, as in SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.core.errors import RequestError
from forerun.core.logprobs import LogprobParams, TokenLogprobs
from forerun.core.request import RequestRecord

_DEFAULTS: dict[str, Any] = {
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
}
LOGPROB_KEYWORDS = tuple(_DEFAULTS)
Entry = tuple[float | None, int, None]  # (log-probability, token id, no text)


def logprob_params(
    keywords: Mapping[str, Any], count: int, single: bool
) -> list[LogprobParams | None]:
    """What each of `count` prompts asks for.

    A keyword is for all prompts, or a list with a value per prompt; `token_ids_logprob` is a list
    of ids, or a list of such lists. `single`: the call has one prompt, which is not a list.

    Raises:
        RequestError: a value is invalid, or their number is wrong.
    """
    columns = []
    for name, default in _DEFAULTS.items():
        value = default if keywords.get(name) is None else keywords[name]
        per_prompt = isinstance(value, list | tuple)
        if name == "token_ids_logprob" and per_prompt:
            per_prompt = bool(value) and isinstance(value[0], list | tuple | None)
        if not per_prompt or single:
            columns.append([value] * count)
            continue
        if len(value) != count:
            raise RequestError(
                f"{len(value)} values of {name} for {count} prompts; give one, or one per prompt."
            )
        columns.append([default if each is None else each for each in value])
    return [LogprobParams.of(*values) for values in zip(*columns, strict=True)]


def logprob_info(request: RequestRecord, num_tokens: int) -> dict[str, Any]:
    """The entries of `meta_info`; `num_tokens`: output tokens that are shown.

    Empty for a request that returns none.
    """
    params = request.logprobs
    if params is None:
        return {}
    start = params.start(len(request.prompt))
    output = request.output_logprobs[:num_tokens]
    of_prompt = request.prompt_logprobs[:]
    ids = request.prompt[start : start + 1 + len(of_prompt)]
    info: dict[str, Any] = {
        "input_token_logprobs": [(None, ids[0], None), *_tokens(of_prompt, ids[1:])],
        "output_token_logprobs": _tokens(output, request.output[: len(output)]),
    }
    if params.top:
        info["input_top_logprobs"] = [None, *map(_top, of_prompt)]
        info["output_top_logprobs"] = [*map(_top, output)]
    if params.token_ids:
        info["input_token_ids_logprobs"] = [None, *(_of_ids(params, each) for each in of_prompt)]
        info["output_token_ids_logprobs"] = [_of_ids(params, each) for each in output]
    return info


def _tokens(logprobs: list[TokenLogprobs], ids: Any) -> list[Entry]:
    return [(each.logprob, token, None) for each, token in zip(logprobs, ids, strict=True)]


def _top(logprobs: TokenLogprobs) -> list[Entry]:
    return [(value, token, None) for value, token in logprobs.top]


def _of_ids(params: LogprobParams, logprobs: TokenLogprobs) -> list[Entry]:
    values = zip(logprobs.of_ids, params.token_ids, strict=True)
    return [(value, token, None) for value, token in values]
