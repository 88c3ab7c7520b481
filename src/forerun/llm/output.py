"""What a user gets back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from forerun.core.request import Request


@dataclass(frozen=True)
class RequestOutput:
    """A text (so far, when streaming) and how it came to be.

    `meta_info` has SGLang's keys. The first token comes from the prefill and belongs to no verify
    step, so `output_ids` are one token and then `spec_accept_lengths[i]` tokens a step.
    """

    text: str
    output_ids: list[int]
    finish_reason: dict[str, Any] | None  # None while running
    meta_info: dict[str, Any]
    prompt_token_ids: list[int]
    prompt_index: int = 0  # which of the call's prompts
    index: int = 0  # which of its n samples

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


def make_output(request: Request, text: str, prompt_index: int, index: int) -> RequestOutput:
    reason = request.finish.as_dict() if request.finish else None
    return RequestOutput(
        text=text,
        output_ids=list(request.output),
        finish_reason=reason,
        meta_info=meta_info(request),
        prompt_token_ids=list(request.prompt),
        prompt_index=prompt_index,
        index=index,
    )


def meta_info(request: Request) -> dict[str, Any]:
    """Figures of a request; the identities of docs/design.md hold between them."""
    steps, correct = request.verify_ct, request.correct_drafts
    histogram = [0] * (max(correct, default=0) + 1) if correct else []
    for count in correct:
        histogram[count] += 1
    end = request.finished_at if request.finished_at is not None else time.monotonic()
    return {
        "id": request.rid,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(request.output),
        "cached_tokens": request.cached_tokens,
        "finish_reason": request.finish.as_dict() if request.finish else None,
        "e2e_latency": end - request.arrival,
        "spec_verify_ct": steps,
        "spec_accept_length": len(request.output) / steps if steps else 0.0,
        "spec_accept_rate": sum(correct) / request.proposed if request.proposed else 0.0,
        "spec_num_correct_drafts": sum(correct),
        "spec_num_proposed_drafts": request.proposed,
        "spec_correct_drafts_histogram": histogram,
        "spec_accept_lengths": list(request.accept_lengths),
    }
