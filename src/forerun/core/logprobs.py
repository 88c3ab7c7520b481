"""Log-probabilities: what a request asks for, and what it gets per token. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.core.checks import boolean, integer
from forerun.core.errors import RequestError, shown

MAX_TOP_LOGPROBS = 20
MAX_TOKEN_IDS = 128  # of `token_ids_logprob`


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which log-probabilities a request returns; defaults: of the output tokens alone.

    Raises:
        RequestError: a value is out of range.
    """

    # Prompt tokens from this position on have an entry each, the first of them without a value;
    # -1: the last prompt token, that is, no values of the prompt.
    start_len: int = -1
    top: int = 0  # most probable tokens of every position
    token_ids: tuple[int, ...] = ()  # further tokens, whose values every position has

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise RequestError(problem)

    def _problems(self) -> Iterator[str]:
        if self.start_len < -1:
            yield (
                "logprob_start_len must be >= 0, or -1 for the output alone, got"
                f" {shown(self.start_len)}."
            )
        if not 0 <= self.top <= MAX_TOP_LOGPROBS:
            yield f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {shown(self.top)}."
        if len(self.token_ids) > MAX_TOKEN_IDS:
            yield _too_many(self.token_ids)

    @classmethod
    def of(
        cls, return_logprob: Any, logprob_start_len: Any, top_logprobs_num: Any, token_ids: Any
    ) -> LogprobParams | None:
        """Makes it from the values of SGLang's API for one request; None: it asks for none.

        Raises:
            RequestError: a value is invalid, or is given without `return_logprob`.
        """
        ids = () if token_ids is None else token_ids
        if not isinstance(ids, list | tuple):
            raise RequestError(
                f"token_ids_logprob must be a list of integers, got {shown(token_ids)}."
            )
        if len(ids) > MAX_TOKEN_IDS:  # before each is looked at
            raise RequestError(_too_many(ids))
        params = cls(
            integer("logprob_start_len", logprob_start_len, RequestError),
            integer("top_logprobs_num", top_logprobs_num, RequestError),
            tuple(integer("token_ids_logprob", token, RequestError) for token in ids),
        )
        if boolean("return_logprob", return_logprob, RequestError):
            return params
        if params.top or params.token_ids:
            name = "top_logprobs_num" if params.top else "token_ids_logprob"
            raise RequestError(f"{name} is set without return_logprob; set return_logprob=True.")
        return None

    def start(self, num_prompt_tokens: int) -> int:
        """Position of the first prompt token that has an entry."""
        return num_prompt_tokens - 1 if self.start_len == -1 else self.start_len


def _too_many(ids: Sequence[Any]) -> str:
    return f"token_ids_logprob takes at most {MAX_TOKEN_IDS} ids, got {len(ids)}."


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    logprob: float  # of the token itself
    top: tuple[tuple[float, int], ...] = ()  # (log-probability, token id), the largest first
    of_ids: tuple[float, ...] = ()  # of `LogprobParams.token_ids`
