"""How many prompt tokens a step computes. No torch.

A step with decode takes as long as its prompt tokens do, and so do the requests that decode wait
for their next tokens. So the prompt tokens beside decode are limited such that the step takes
`max_mixed_step` seconds (chunked prefill with a token budget; Sarathi-Serve, OSDI 2024, section 4,
where the budget is profiled in advance). The limit follows the measured times of steps: what a
token costs depends on the machine, the batch, and the length of the context.
"""

from __future__ import annotations

from forerun.scheduler.step_times import StepTimes

FIRST_TOKENS = 256  # the limit before anything was measured; it doubles from there
# Fewer take about as long, since a pass reads all weights. So prompts go on where decode alone
# takes longer than the limit.
MIN_TOKENS = 128
TILE = 32  # the limit is a multiple of it: prefill kernels compute tokens in tiles
MIN_SHARE = 0.01  # of a step's time that its prompt tokens have taken


class PrefillBudget:
    """The limit of the next step."""

    def __init__(self, max_tokens: int, max_mixed_step: float, times: StepTimes) -> None:
        """
        Args:
            max_tokens: of any step.
            max_mixed_step: seconds of a step with decode; 0: no limit but `max_tokens`.
            times: knows how long decode takes, of the steps before the one that is recorded.
        """
        self._times = times
        self._max_tokens, self._seconds = max_tokens, max_mixed_step
        self._min_tokens = min(MIN_TOKENS, max_tokens)
        self._mixed = min(FIRST_TOKENS, max_tokens) if max_mixed_step else max_tokens

    def tokens(self, mixed: bool) -> int:
        """Most prompt tokens of the next step. `mixed`: it decodes too."""
        if not mixed or self._mixed >= self._max_tokens:
            return self._max_tokens
        return max(self._mixed // TILE * TILE, self._min_tokens)

    def record(self, num_tokens: int, decode: bool, seconds: float) -> None:
        """A step with `num_tokens` prompt tokens took so many seconds.

        In a step that was too long the limit falls at once. It at most doubles, in mixed steps that
        have used at least half of it, so one slow step is soon forgotten.
        """
        if not self._seconds or seconds <= 0 or num_tokens == 0:
            return
        expected = self._times.expected(0, True) or 0.0  # of decode alone
        spent = max(seconds - expected * decode, MIN_SHARE * seconds)
        fitting = int(num_tokens * max(self._seconds - expected, 0.0) / spent)
        if seconds > self._seconds:
            self._mixed = min(self._mixed, fitting)
        elif decode and 2 * num_tokens >= self._mixed:
            self._mixed = min(2 * self._mixed, fitting)
        self._mixed = min(max(self._mixed, self._min_tokens), self._max_tokens)
