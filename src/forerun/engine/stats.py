"""Counters of speculation since the start of the engine.

Names follow the metrics of vLLM and SGLang (`NAMES`). Counters only grow; `spec_accept_length` and
`spec_accept_rate` are means over all steps so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from forerun.core.plan import ConfidenceCounts
from forerun.scheduler.calibration import reliability
from forerun.scheduler.scheduler import CompletedStep

NAMES = {  # key of `SpecStats.as_dict()` -> metric of vLLM or SGLang
    "spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "spec_accept_length": "sglang:spec_accept_length",
    "spec_accept_rate": "sglang:spec_accept_rate",
}


class SpecStats:
    """Acceptance counters of one engine.

    A draft counts as accepted if the target sampled the same token, even if a stop earlier in the
    same step cut it off; a request's own `meta_info` only counts tokens that it returned.
    """

    def __init__(self, algorithm: str, max_drafts: int) -> None:
        """`max_drafts`: drafts that a step verifies per request, at most."""
        self.algorithm = algorithm
        self.num_steps = 0  # decode steps of any width
        self.num_request_steps = 0  # sum of their batch sizes
        self.num_tokens = 0  # committed
        self.num_drafts = 0  # requests with drafts, summed over steps
        self.num_draft_tokens = 0
        self.num_failures = 0  # steps in which the algorithm failed
        self.warnings: list[str] = []
        # Index: accepted drafts; value: how often, over requests with drafts and steps.
        self.accepted = [0] * (max_drafts + 1)
        self.confidences: ConfidenceCounts | None = None  # the newest; it only grows
        self._flushed = (0, 0)  # `num_tokens` and `num_request_steps` at the last flush

    def mark_flush(self) -> None:
        """The prefix cache was emptied: `spec_accept_length_since_flush` starts again."""
        self._flushed = (self.num_tokens, self.num_request_steps)

    def count(self, done: CompletedStep) -> None:
        """Counts a completed step, without requests that had ended before it."""
        plan = done.step.plan
        self.confidences = done.result.confidences or self.confidences
        self.num_steps += bool(plan.decode)
        self.num_request_steps += len(done.live)
        self.num_tokens += sum(len(done.result.decode[at]) for at in done.live)
        if plan.num_verify_tokens == 1:
            return
        verified = done.result.drafts_of(plan)
        for at in done.live:
            num_drafts = done.step.decode[at].params.draft_limit(verified[at])
            if num_drafts:
                self.num_drafts += 1
                self.num_draft_tokens += num_drafts
                self.accepted[max(min(len(done.result.decode[at]) - 1, num_drafts), 0)] += 1

    def as_dict(self) -> dict[str, Any]:
        per_position = accepted_per_position(self.accepted)
        accepted = sum(per_position)
        tokens, steps = (
            self.num_tokens - self._flushed[0],
            self.num_request_steps - self._flushed[1],
        )
        return {
            "algorithm": self.algorithm,
            "decode_steps": self.num_steps,
            "decode_tokens": self.num_tokens,
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": accepted,
            "spec_decode_num_accepted_tokens_per_pos": per_position,
            "spec_accept_length": self.num_tokens / self.num_request_steps
            if self.num_request_steps
            else None,
            "spec_accept_length_since_flush": tokens / steps if steps else None,
            "spec_accept_rate": accepted / self.num_draft_tokens if self.num_drafts else None,
            "algorithm_failures": self.num_failures,
            "warnings": list(self.warnings),
            "confidence": None if self.confidences is None else reliability(self.confidences),
        }


def accepted_per_position(accepted: Sequence[int]) -> list[int]:
    """How often each draft position was accepted.

    Args:
        accepted: [K + 1], how often so many drafts of a step were; its index is the number.
    """
    # Draft k was accepted whenever k or more were.
    return list(accumulate(reversed(accepted[1:])))[::-1]
