"""How long steps take, learned from those that have run. No torch.

Prompt tokens: seconds = fixed + per token · tokens, fitted to the newest steps without decode. The
fixed part is what a pass costs however few its tokens are: weights are read, kernels are launched.
"""

from __future__ import annotations

from typing import NamedTuple

DECAY = 0.95  # of the weight of a step, with each later one
MIN_SPREAD = (
    0.1  # standard deviation of the steps' tokens over their mean, below which no line fits
)
MAX_FIXED = 0.1  # part of an efficient step's time
MIN_EFFICIENT = 1024  # tokens; fewer save little time, and the host works for each step
# Prompt tokens in the time that a step costs beside its tokens, at least: the host's part of it is
# not in the device's time.
MIN_FIXED_TOKENS = 128
DECODE_WEIGHT = 0.2  # of the newest step in the moving average of decode
RISE = 0.02  # of the shortest decode, with each step that is longer
LEAST_PROMPTS = 0.8  # of the expected time of prompts
OUTLIER = 2.0  # a step that takes less than its expected time over this shows that it was wrong


class _Sums(NamedTuple):
    """Sums over the steps, weighted."""

    n: float = 0.0
    x: float = 0.0  # tokens
    y: float = 0.0  # seconds
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> _Sums:
        new = (1.0, x, y, x * x, x * y)
        return _Sums(*(DECAY * old + each for old, each in zip(self, new, strict=True)))

    def line(self) -> tuple[float, float] | None:
        """The fixed part and that of a token; None: the steps are too much alike."""
        n, x, y, xx, xy = self
        variance = n * xx - x * x  # times n²
        if n == 0 or variance <= (MIN_SPREAD * x) ** 2:
            return None
        per_token = (n * xy - x * y) / variance
        fixed = (y - per_token * x) / n
        return (fixed, per_token) if fixed >= 0 and per_token > 0 else (0.0, y / x)

    def at_least(self, num_tokens: int) -> float:
        """Seconds of so many tokens; without a line more tokens may take no longer."""
        if self.n == 0:
            return 0.0
        line = self.line()
        if line is None:
            return self.y / self.x * min(num_tokens, self.x / self.n)
        return line[0] + line[1] * num_tokens


class StepTimes:
    """Expectations of the next step."""

    def __init__(self) -> None:
        self._prompts = _Sums()
        self._line: tuple[float, float] | None = None  # through the prompts, or their mean
        self._decode = 0.0  # seconds of decode; 0: not known
        self._least_decode = 0.0  # of the shortest of the last steps

    def record(self, num_tokens: int, decode: bool, seconds: float) -> None:
        """A step with `num_tokens` prompt tokens took so many seconds."""
        if seconds <= 0:
            return
        if num_tokens and not decode:
            self._record_prompts(num_tokens, seconds)
        elif decode and (not num_tokens or self._line):
            own = max(seconds - self._prompt_seconds(num_tokens), 0.0)
            weight = DECODE_WEIGHT if self._decode else 1.0
            self._decode += weight * (own - self._decode)
            self._least_decode = min(own, (1 + RISE) * self._least_decode or own)

    def _record_prompts(self, num_tokens: int, seconds: float) -> None:
        if self._prompts.at_least(num_tokens) > OUTLIER * seconds:
            self._prompts = _Sums()  # something was compiled, or another program ran
        self._prompts = self._prompts.add(float(num_tokens), seconds)
        self._line = self._prompts.line() or (0.0, self._prompts.y / self._prompts.x)

    def expected(self, num_tokens: int, decode: bool) -> float | None:
        """Seconds of a step with `num_tokens` prompt tokens; None: not known."""
        if (num_tokens and not self._line) or (decode and not self._decode):
            return None
        return self._prompt_seconds(num_tokens) + self._decode * decode

    def least(self, num_tokens: int, decode: bool) -> float:
        """What a step takes even if its decode is as short as the shortest lately; 0: not known."""
        if self.expected(num_tokens, decode) is None:
            return 0.0
        return LEAST_PROMPTS * self._prompt_seconds(num_tokens) + self._least_decode * decode

    def tokens(self, seconds: float) -> int:
        """How many prompt tokens fit into so much time; 0 also if that is not known."""
        if self._line is None:
            return 0
        fixed, per_token = self._line
        return max(int((seconds - fixed) / per_token), 0)

    @property
    def efficient_tokens(self) -> int | None:
        """The fewest prompt tokens that cost little more each than many do; None: not known."""
        line = self._prompts.line()
        if line is None:
            return None
        fixed, per_token = line
        return max(int((1 / MAX_FIXED - 1) * fixed / per_token), MIN_EFFICIENT)

    def shortest_wait(self, waiting: int) -> int | None:
        """Prompt tokens of the next step with which so many that wait have the shortest mean wait;
        None: not known.

        More in a step make its first prompt wait for the last, fewer make all that are behind it
        wait for the fixed parts of more steps. With n prompts of u seconds each and a fixed part f,
        steps of sqrt(2 n f / u) prompts have the least mean (batching on one machine with a setup
        time: Santos and Magazine, Operations Research Letters 4, 1985).
        """
        line = self._prompts.line()
        if line is None:
            return None
        fixed, per_token = line
        fixed_tokens = max(fixed / per_token, MIN_FIXED_TOKENS)
        return max(int((2 * waiting * fixed_tokens) ** 0.5), MIN_EFFICIENT)

    def _prompt_seconds(self, num_tokens: int) -> float:
        if not num_tokens or self._line is None:
            return 0.0
        fixed, per_token = self._line
        return fixed + per_token * num_tokens
