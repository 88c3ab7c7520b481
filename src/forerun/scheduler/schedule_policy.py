"""Settings of the scheduler. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """The order of admission, how long a step may be, what decode steps keep."""

    longest_prefix: bool = False  # lpm; otherwise first come, first served
    low_priority_values_first: bool = False
    max_prefill_tokens: int | None = None  # prompt tokens per step; None: `chunked_prefill_size`
    max_mixed_step: float = 0.0  # seconds of a step with decode and prompt tokens; 0: no limit
    # Seconds for which a request with its first token waits for prompts before it decodes.
    max_first_gap: float = 0.0
    track_interval: int = 0  # generated tokens between snapshots of recurrent state; 0: none

    def rank(self, priority: int) -> int:
        """The smallest goes first."""
        return priority if self.low_priority_values_first else -priority
