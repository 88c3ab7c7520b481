"""Ends a request at a stop id or at `max_new_tokens`. No torch.

Stop ids are tested first: a stop id as the last allowed token is a stop. Stop strings are found
above the engine, in `llm/text.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.logprobs import TokenLogprobs
from forerun.core.request import FinishReason, Request


def append_tokens(
    request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
) -> int:
    """Appends committed tokens to the output, up to and including the first stop.

    Sets `request.finish` at a stop. Returns the number of tokens appended.

    `logprobs`: one per token, of a request that returns them.
    """
    output, kept = request.output, len(tokens)
    left = request.params.max_new_tokens - len(output)
    if kept < left and request.stop_ids.isdisjoint(tokens):
        output += tokens
    else:
        kept = _append_until_stop(request, tokens)
    if logprobs:
        request.output_logprobs += logprobs[:kept]
    return kept


def _append_until_stop(request: Request, tokens: Sequence[int]) -> int:
    output, max_new_tokens = request.output, request.params.max_new_tokens
    if tokens and max_new_tokens == 0:  # the prompt is all that was to be run
        request.finish = FinishReason("length", length=0)
        return 0
    for count, token in enumerate(tokens, 1):
        output.append(token)
        if token in request.stop_ids:
            request.finish = FinishReason("stop", matched=token)
        elif len(output) >= max_new_tokens:
            request.finish = FinishReason("length", length=len(output))
        if request.finish is not None:
            return count
    return len(tokens)
