"""Which steps decode while there are prompts to compute. No torch.

A request that decodes beside prompts costs almost a whole decode step for few tokens, and delays
the first token of everyone who waits. So prompts go first, as far as those who read may wait:

- Requests that have begun to decode get tokens at least every `max_mixed_step` seconds.
- New ones, with their first token, wait for the others of a burst, at most `max_first_gap` seconds:
  then all of them decode in one batch. A burst is prompts that take longer than `BURST_SECONDS` to
  prefill, and it lasts until no prompt waits. Shorter ones do not delay decode: with closed-loop
  clients (the next request is sent when an answer is there) arrivals then spread out, and prompts
  queue less behind one another.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.plan import StepPlan
from forerun.core.request import Request
from forerun.scheduler.prefill_budget import MIN_TOKENS
from forerun.scheduler.schedule_policy import SchedulePolicy
from forerun.scheduler.step_times import MIN_EFFICIENT, StepTimes

BURST_SECONDS = 0.5


class DecodeTurns:
    """Counts the expected time of steps. Nothing waits before that is known."""

    def __init__(self, policy: SchedulePolicy, max_tokens: int) -> None:
        """`max_tokens`: prompt tokens of any step."""
        self.times = StepTimes()
        self._max_gap, self._max_first_gap = policy.max_mixed_step, policy.max_first_gap
        self._max_tokens = max_tokens
        self._seconds = 0.0  # of all steps so far
        self._last_decode = 0.0  # of those up to the last one with decode
        # Requests that have not decoded, with the seconds up to the last chunk of their prompts.
        self._new: dict[Request, float] = {}
        self._burst = False

    def add(self, request: Request) -> None:
        """The last chunk of its prompt was planned. One that was preempted is not new."""
        if not request.preemptions:
            self._new[request] = self._seconds

    def remove(self, request: Request) -> None:
        """It has ended, or has to be prefilled again."""
        self._new.pop(request, None)

    def waits(self, request: Request, rank: int | None) -> bool:
        """Whether it lets the prompts of a burst go first.

        Args:
            rank: of the priority of the prompt that is next; None: there is none. A request does
                not wait for less urgent ones.
        """
        since = self._new.get(request) if self._burst else None
        if since is None or rank is None or rank > request.order[0]:
            return False
        return self._seconds - since < self._max_first_gap

    @property
    def burst_tokens(self) -> int:
        """How many prompt tokens make a burst; 0: it does not matter now, or is not known."""
        matters = self._new and self._max_first_gap and not self._burst
        return self.times.tokens(BURST_SECONDS) if matters else 0

    def begin_burst(self) -> None:
        """There are that many."""
        self._burst = True

    def tokens_before_decode(self, decoding: Sequence[Request], rank: int | None) -> int:
        """Prompt tokens of a step in which none of these requests decodes; 0: some are due.

        Args:
            rank: as of `waits`.
        """
        if not decoding or rank is None or self.times.expected(1, True) is None:
            return 0
        if all(self.waits(request, rank) for request in decoding):
            return self._max_tokens
        tokens = min(self.times.efficient_tokens or MIN_EFFICIENT, self._max_tokens)
        seconds = self.times.expected(tokens, False) or 0.0
        # The step after it decodes, and has prompt tokens too.
        both = self.times.expected(tokens, True) or 0.0
        left = self._max_gap - (self._seconds - self._last_decode) - both
        return min(self.times.tokens(left), self._max_tokens) if left >= seconds else 0

    def tokens_beside_decode(self, most: int) -> int:
        """Prompt tokens of a step with decode: what fits into the rest of the time to wait."""
        waited = self._seconds - self._last_decode
        expected = self.times.expected(0, True)
        if not waited or not self._max_gap or expected is None:
            return most
        fitting = self.times.tokens(self._max_gap - waited - expected)
        return min(most, max(fitting, MIN_TOKENS))

    def enough_tokens(self, waiting: int) -> int:
        """Prompt tokens after which a step takes no further prompt, of so many that wait."""
        return min(self.times.shortest_wait(waiting) or self._max_tokens, self._max_tokens)

    def no_prompts(self) -> None:
        """No prompt can be computed now, so that nothing waits for one."""
        self._new.clear()
        self._burst = False

    def planned(self, plan: StepPlan, decoding: Sequence[Request]) -> None:
        """A step was planned, in which these requests decode."""
        expected = self.times.expected(plan.num_prefill_tokens, bool(plan.decode))
        self._seconds += expected or 0.0
        if plan.decode or not plan.prefill:
            self._last_decode = self._seconds
        if not plan.prefill:
            self.no_prompts()
        for request in decoding if self._new else ():
            self.remove(request)
