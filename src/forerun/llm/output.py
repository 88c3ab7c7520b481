"""Outputs of requests, and their statistics (`meta_info`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from forerun.core.request import RequestRecord, drop_last
from forerun.llm.logprobs import logprob_info


@dataclass(frozen=True)
class RequestOutput:
    """The output of one request, or a part of it when streaming.

    `meta_info` has SGLang's keys. The first token comes from the prefill and belongs to no verify
    step, so `output_ids` has one token and then `spec_accept_lengths[i]` tokens of step i.
    """

    text: str
    output_ids: list[int]
    finish_reason: dict[str, Any] | None  # None while running
    meta_info: dict[str, Any]
    prompt_token_ids: list[int]
    prompt_index: int = 0  # index into the call's prompts
    index: int = 0  # index of the sample, with n > 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def error(self) -> str | None:
        """Why the request was aborted; None if it was not."""
        reason = self.finish_reason
        aborted = reason is not None and reason["type"] == "abort"
        return str(reason["message"]) if reason is not None and aborted else None


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: list[float]  # in float32
    prompt_token_ids: list[int]
    meta_info: dict[str, Any]  # as of `RequestOutput`
    prompt_index: int = 0  # index into the call's prompts


class Progress(NamedTuple):
    """The state of a request after a step.

    The lists are the request's own. They only grow, so lengths suffice to describe a step, and
    nothing is copied in the engine's thread.
    """

    output: list[int]
    num_tokens: int  # tokens of `output` to be shown
    held: int  # tokens after them that are held back
    accept_lengths: list[int]
    correct_drafts: list[int]
    num_steps: int  # entries of both lists
    proposed: int
    finished: bool

    @classmethod
    def of(cls, request: RequestRecord, num_tokens: int | None = None) -> Progress:
        """`num_tokens`: tokens to be shown of a running request; None: it has ended, show all."""
        total = len(request.output)
        shown = total if num_tokens is None else num_tokens
        return cls(
            output=request.output,
            num_tokens=shown,
            held=total - shown,
            accept_lengths=request.accept_lengths,
            correct_drafts=request.correct_drafts,
            num_steps=len(request.accept_lengths),
            proposed=request.proposed,
            finished=num_tokens is None,
        )


def make_output(
    request: RequestRecord,
    progress: Progress,
    text: str,
    prompt_index: int,
    index: int,
    prompt_token_ids: list[int] | None = None,
) -> RequestOutput:
    """`prompt_token_ids`: a list of the prompt's tokens; None: a new one is made."""
    info = meta_info(request, progress)
    return RequestOutput(
        text=text,
        output_ids=progress.output[: progress.num_tokens],
        finish_reason=info["finish_reason"],
        meta_info=info,
        prompt_token_ids=list(request.prompt) if prompt_token_ids is None else prompt_token_ids,
        prompt_index=prompt_index,
        index=index,
    )


def _correct_drafts(progress: Progress, lengths: Sequence[int]) -> tuple[int, list[int]]:
    """How many drafts were correct, and the number of steps by that.

    A stream calls this for every event, so steps without drafts are not looked at one by one.
    """
    steps = progress.num_steps
    if not progress.proposed:
        return 0, [steps] if steps else []
    correct = progress.correct_drafts[:steps]
    for at in reversed(range(steps)):
        if 0 < lengths[at] >= correct[at]:
            break  # only the last steps are cut
        correct[at] = min(correct[at], lengths[at])
    counts = Counter(correct)
    return sum(correct), [counts[accepted] for accepted in range(max(counts, default=-1) + 1)]


def meta_info(request: RequestRecord, progress: Progress | None = None) -> dict[str, Any]:
    """Statistics of a request; docs/design.md has the identities between them."""
    progress = Progress.of(request) if progress is None else progress
    tokens, steps = progress.num_tokens, progress.num_steps
    lengths = drop_last(progress.accept_lengths[:steps], progress.held)
    total, histogram = _correct_drafts(progress, lengths)
    finish, end = (request.finish, request.finished_at) if progress.finished else (None, None)
    return {
        "id": request.rid,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": tokens,
        "cached_tokens": request.cached_tokens,
        "finish_reason": finish.as_dict() if finish else None,
        "e2e_latency": (time.monotonic() if end is None else end) - request.arrival,
        "spec_verify_ct": steps,
        "spec_accept_length": tokens / steps if steps else 0.0,
        "spec_accept_rate": total / progress.proposed if progress.proposed else 0.0,
        "spec_num_correct_drafts": total,
        "spec_num_proposed_drafts": progress.proposed,
        "spec_correct_drafts_histogram": histogram,
        "spec_accept_lengths": lengths,
        **logprob_info(request, tokens),
    }
