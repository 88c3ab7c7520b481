"""Where the output of a request ends, by token ids alone.

Stop ids are tested before the length: a stop id on the last allowed token is a stop. Stop strings
are found above the engine, in `llm/text.py`. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.request import FinishReason, Request


def append_tokens(request: Request, tokens: Sequence[int]) -> int:
    """Appends committed tokens to the output, up to and with the first stop.

    Sets `request.finish` at a stop. Returns how many were appended.
    """
    output, most = request.output, request.params.max_new_tokens
    for count, token in enumerate(tokens, 1):
        output.append(token)
        if token in request.stop_ids:
            request.finish = FinishReason("stop", matched=token)
        elif len(output) >= most:
            request.finish = FinishReason("length", length=len(output))
        if request.finish is not None:
            return count
    return len(tokens)
