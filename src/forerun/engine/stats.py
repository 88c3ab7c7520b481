"""Counters of speculation since the engine was made: plain integers, counted as results are booked.

The names are those of other servers' metrics (`NAMES`). The counters behind them only grow; the two
gauges are means over all that was counted.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from forerun.scheduler.scheduler import CompletedStep

NAMES = {  # of `SpecStats.as_dict()` -> in vLLM's or SGLang's metrics
    "spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "spec_accept_length": "sglang:spec_accept_length",
    "spec_accept_rate": "sglang:spec_accept_rate",
}


class SpecStats:
    """What the drafts of one engine's algorithm were worth.

    A draft token counts as accepted when the target drew it too, also where a stop in the same
    step cut it off again; what a request is told (`meta_info`) counts what it got.
    """

    def __init__(self, algorithm: str, drafts: int) -> None:
        """`drafts`: the most that a step verifies for a request."""
        self.algorithm = algorithm
        self.steps = 0  # decode steps, whatever their width
        self.rows = 0  # requests in them, added up
        self.tokens = 0  # committed by them
        self.num_drafts = 0  # rows that had drafts
        self.num_draft_tokens = 0
        self.failures = 0  # steps in which the algorithm failed
        self._accepted = [0] * (drafts + 1)  # rows with drafts by how many of them were right

    def count(self, done: CompletedStep) -> None:
        """Books a step; requests that had ended before are left out."""
        plan = done.step.plan
        self.steps += bool(plan.decode)
        rows = zip(done.step.decode, done.result.decode, done.live_decode, strict=True)
        for request, tokens, live in rows:
            if not live:
                continue
            self.rows += 1
            self.tokens += len(tokens)
            drafts = request.params.draft_limit(plan.num_verify_tokens - 1)
            if drafts:
                self.num_drafts += 1
                self.num_draft_tokens += drafts
                self._accepted[max(min(len(tokens) - 1, drafts), 0)] += 1

    def as_dict(self) -> dict[str, Any]:
        # Draft k was accepted wherever k or more were.
        per_position = list(accumulate(reversed(self._accepted[1:])))[::-1]
        accepted = sum(per_position)
        return {
            "algorithm": self.algorithm,
            "decode_steps": self.steps,
            "decode_tokens": self.tokens,
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": accepted,
            "spec_decode_num_accepted_tokens_per_pos": per_position,
            "spec_accept_length": self.tokens / self.rows if self.rows else None,
            "spec_accept_rate": accepted / self.num_draft_tokens if self.num_drafts else None,
            "algorithm_failures": self.failures,
        }
