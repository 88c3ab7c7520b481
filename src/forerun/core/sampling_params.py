"""Sampling parameters and stop conditions of a request (names as in SGLang)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from forerun.core.checks import boolean, integer, number
from forerun.core.errors import RequestError, nearest, shown
from forerun.core.grammar import GRAMMAR_PARAMS, KINDS, Grammar, grammar_of, grammar_source
from forerun.core.unsupported import refusal

MAX_STOP_IDS = 16  # columns of the device table used by `min_new_tokens`
MAX_STOP_TOKENS = 1024
MAX_STOPS, MAX_STOP_LENGTH = 32, 1024  # stop strings are matched after every token
MAX_SAMPLES = 1024  # per prompt
MAX_BIASES, MAX_BIAS = 1024, 100.0  # entries of `logit_bias` (columns of a device table), size
MAX_PENALTY, MAX_REPETITION_PENALTY = 2.0, 2.0
MAX_TOKEN_DIGITS = 10
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    `logit_bias` and the penalties change the logits, in this order. With c the number of times that
    a token is in the output so far:

        logit += bias
        logit = logit / repetition if logit > 0 else logit * repetition   if c > 0 or in the prompt
        logit -= frequency * c + presence * (c > 0)

    Filters follow, in the order temperature, top-k, top-p, min-p. Temperature 0 is greedy.
    `sampling_seed` fixes the text: the noise is keyed by (seed, position), so it is the same with
    any drafter or none; a request without a seed gets one from the engine's `random_seed`.

    A grammar restricts every token to those with which the output can still match it. EOS is
    possible where the output is complete, and ends it. So `ignore_eos` and `min_new_tokens` only
    delay the end as long as the grammar allows another token.

    Raises:
        RequestError: a value is out of range, or two values contradict each other.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    # (token id, bias); given as a mapping, whose keys may be strings of digits as in JSON.
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_new_tokens: int = 128  # 0: only the prompt runs, for its log-probabilities
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    speculative: bool = True  # False: no drafts for this request
    max_draft_tokens: int | None = None  # drafts verified per step; None: the engine's limit
    # At most one grammar. Schemas and structural tags are JSON, as text or as a dict.
    json_schema: str | None = None
    regex: str | None = None  # of the whole output
    ebnf: str | None = None  # in GBNF; the first rule is called root
    structural_tag: str | None = None
    json_object: bool = False  # any JSON object

    def __post_init__(self) -> None:
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_ids(self.stop_token_ids))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        for name in KINDS:
            self._set(name, grammar_source(name, getattr(self, name)))
        grammar_of(self._grammar_params)  # refuses several
        for name in _NUMBERS:
            self._set(name, number(name, getattr(self, name), RequestError))
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, integer(name, value, RequestError))
        for name in _BOOLEANS:
            boolean(name, getattr(self, name), RequestError)
        for problem in self._problems():
            raise RequestError(problem)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def grammar(self) -> Grammar | None:
        return grammar_of(self._grammar_params)

    @property
    def _grammar_params(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in GRAMMAR_PARAMS}

    def draft_limit(self, num_drafts: int) -> int:
        """How many of a step's `num_drafts` drafts this request may accept."""
        if not self.speculative:
            return 0
        limit = self.max_draft_tokens
        return num_drafts if limit is None else min(limit, num_drafts)

    @classmethod
    def of(cls, value: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Accepts an instance, a dict as in SGLang's API, or None for the defaults."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise RequestError(
                f"sampling_params must be a SamplingParams or a dict, not {type(value).__name__}."
            )
        known = [f.name for f in fields(cls)]
        for key in value:
            if key not in known:
                raise RequestError(
                    refusal(str(key), known)
                    or f"Unknown sampling parameter {shown(key)}.{nearest(str(key), known)}"
                    f" Known: {', '.join(known)}."
                )
        return cls(**value)

    def _problems(self) -> Iterator[str]:
        """Values out of range or of the device tables' dtypes, and contradictions."""
        if not 0 <= self.temperature <= MAX_FLOAT32:
            yield f"temperature must be >= 0 (0 is greedy), in float32, got {self.temperature}."
        if not 0 < self.top_p <= 1:
            yield f"top_p must be in (0, 1], got {self.top_p}; 1 switches it off."
        if self.top_k != -1 and not 1 <= self.top_k <= MAX_INT32:
            yield (
                f"top_k must be >= 1, or -1 to switch it off, and fit in 32 bits, got"
                f" {shown(self.top_k)}."
            )
        if not 0 <= self.min_p <= 1:
            yield f"min_p must be in [0, 1], got {self.min_p}; 0 switches it off."
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            if not -MAX_PENALTY <= value <= MAX_PENALTY:
                yield f"{name} must be in [-2, 2], got {value}; 0 switches it off."
        if not 0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            yield (
                f"repetition_penalty must be in (0, 2], got {self.repetition_penalty}; 1 switches"
                " it off."
            )
        if not 0 <= self.max_new_tokens <= MAX_INT32:
            yield (
                f"max_new_tokens must be >= 0 and fit in 32 bits, got {shown(self.max_new_tokens)}."
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            yield (
                f"min_new_tokens must be in [0, max_new_tokens], got {shown(self.min_new_tokens)}"
                f" with max_new_tokens {self.max_new_tokens}."
            )
        if not 1 <= self.n <= MAX_SAMPLES:
            yield f"n must be >= 1 and at most {MAX_SAMPLES}, got {shown(self.n)}."
        if self.n > 1 and self.temperature == 0.0:
            yield "n > 1 with temperature 0 gives n equal texts; raise temperature or use n=1."
        max_drafts, seed = self.max_draft_tokens, self.sampling_seed
        if max_drafts is not None and not 0 <= max_drafts <= MAX_INT32:
            yield (
                f"max_draft_tokens must be >= 0 (0: no drafts) and fit in 32 bits, got"
                f" {shown(max_drafts)}."
            )
        if seed is not None and not -(2**63) <= seed < 2**63:
            yield f"sampling_seed must fit in 64 bits, got {shown(seed)}."


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_INTEGERS = ("top_k", "max_new_tokens", "min_new_tokens", "n", "sampling_seed", "max_draft_tokens")
_OPTIONAL = ("sampling_seed", "max_draft_tokens")
_BOOLEANS = ("ignore_eos", "skip_special_tokens", "speculative")


def _stop_strings(given: Any) -> tuple[str, ...]:
    """Reads a string, a list of strings, or None."""
    stops = (given,) if isinstance(given, str) else () if given is None else given
    if not isinstance(stops, list | tuple):
        raise RequestError(f"stop must be a string or a list of strings, got {shown(given)}.")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop takes at most {MAX_STOPS} strings, got {len(stops)}.")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise RequestError(f"stop must hold non-empty strings, got {shown(stop)}.")
        if len(stop) > MAX_STOP_LENGTH:
            raise RequestError(
                f"A stop string has at most {MAX_STOP_LENGTH} characters, got {len(stop)}:"
                f" {shown(stop)}."
            )
    return tuple(stops)


def _stop_ids(given: Any) -> tuple[int, ...]:
    ids = () if given is None else given
    if not isinstance(ids, list | tuple | set | frozenset):
        raise RequestError(f"stop_token_ids must be a list of integers, got {shown(given)}.")
    if len(ids) > MAX_STOP_TOKENS:
        raise RequestError(f"stop_token_ids takes at most {MAX_STOP_TOKENS} ids, got {len(ids)}.")
    return tuple(integer("stop_token_ids", token, RequestError) for token in ids)


def _logit_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Reads a mapping of token ids to biases, pairs of them, or None."""
    entries = given.items() if isinstance(given, Mapping) else () if given is None else given
    if not isinstance(given, Mapping | tuple | None):
        raise RequestError(
            f"logit_bias must be a mapping of token ids to biases, got {shown(given)}."
        )
    if len(entries) > MAX_BIASES:
        raise RequestError(f"logit_bias takes at most {MAX_BIASES} tokens, got {len(entries)}.")
    biases: dict[int, float] = {}
    for entry in entries:
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise RequestError(f"logit_bias must hold (token id, bias), got {shown(entry)}.")
        key, value = entry
        token = _token_id(key)
        if token in biases:
            raise RequestError(f"logit_bias has token {token} twice; give each token once.")
        bias = biases[token] = number("logit_bias", value, RequestError)
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise RequestError(f"logit_bias must be in [-100, 100], got {bias} for token {token}.")
    return tuple(biases.items())


def _token_id(key: Any) -> int:
    """A token id, or a string of its digits: keys of JSON objects are strings."""
    if isinstance(key, str):
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_TOKEN_DIGITS):
            raise RequestError(f"logit_bias has token ids as keys, got {shown(key)}.")
        return int(key)
    return integer("A key of logit_bias", key, RequestError)


def check_stop_ids(params: SamplingParams, stop_ids: Collection[int]) -> None:
    """Checks that stop ids (EOS and the request's own) fit the device table if they are masked.

    Raises:
        RequestError: `min_new_tokens` together with more than MAX_STOP_IDS stop ids.
    """
    if params.min_new_tokens > 0 and len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(
            f"min_new_tokens works with at most {MAX_STOP_IDS} stop ids (EOS included), got"
            f" {len(stop_ids)}; give fewer stop_token_ids or set min_new_tokens=0."
        )
