"""The `usage` of OpenAI's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.llm.output import meta_info
from forerun.server.generation import Generation


def usage(
    generations: Sequence[Generation], spec_info: bool, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """Token counts; the samples of a prompt share it.

    Args:
        spec_info: with figures of speculation, in `completion_tokens_details`.
        reasoning_tokens: None: reasoning is not told apart.
    """
    firsts = [generation for generation in generations if generation.index == 0]
    prompt = sum(len(generation.record.prompt) for generation in firsts)
    completion = sum(len(generation.record.output) for generation in generations)
    out: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(generation.record.cached_tokens for generation in firsts)
        },
    }
    details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    if spec_info:
        details |= _spec_info(generations, completion)
    return {**out, "completion_tokens_details": details} if details else out


def _spec_info(generations: Sequence[Generation], completion: int) -> dict[str, Any]:
    infos = [meta_info(generation.record) for generation in generations]
    steps = sum(info["spec_verify_ct"] for info in infos)
    accepted = sum(info["spec_num_correct_drafts"] for info in infos)
    proposed = sum(info["spec_num_proposed_drafts"] for info in infos)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": proposed - accepted,
        "spec_verify_ct": steps,
        "spec_accept_length": completion / steps if steps else 0.0,
    }
