"""Sampling parameters and stop conditions of a request (names as in SGLang): one table.

A field and its `Param` are all that checks, flags, request bodies, plans and device tables need of
a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache, wraps
from operator import attrgetter
from typing import Any, Literal, TypeVar

from forerun.core.checks import boolean, integer, number
from forerun.core.errors import RequestError, nearest, shown
from forerun.core.grammar import GRAMMAR_PARAMS, KINDS, Grammar, grammar_of, grammar_source
from forerun.core.unsupported import refusal

T = TypeVar("T")

MAX_STOP_IDS = 16  # columns of the device table used by `min_new_tokens`
MAX_STOP_TOKENS = 1024
MAX_STOPS, MAX_STOP_LENGTH = 32, 1024  # stop strings are matched after every token
MAX_SAMPLES = 1024  # per prompt
MAX_BIASES, MAX_BIAS = 1024, 100.0  # entries of `logit_bias` (columns of a device table), size
MAX_TOKEN_DIGITS = 10
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
POSITIVE = math.ulp(0.0)  # the smallest number above 0
MIN_REPETITION = 1e-6  # logits are divided by it, which much smaller ones would make infinite


@dataclass(frozen=True, slots=True)
class Param:
    """What is known of a sampling parameter besides its name, type and default."""

    help: str  # of the flag
    # What applies it: an edit of the logits, the sampler's filters, a mask of tokens, or the host.
    stage: Literal["logits", "filter", "mask", "host"] = "host"
    range: tuple[float, float] | None = None  # the default is allowed as well
    must: str = ""  # what a value in `range` is, after "must"
    off: bool = False  # the default switches it off, and an error says so
    openai: str | None = ""  # its name in OpenAI's API; "": the same; None: no field of its own
    description: str | None = None  # in the OpenAPI document

    def problem(self, name: str, value: Any, default: Any) -> str | None:
        """Why a value of the right type is refused."""
        if self.range is None or value == default or self.range[0] <= value <= self.range[1]:
            return None
        end = f"; {default:g} switches it off" if self.off else ""
        return f"{name} must {self.must}, got {shown(value)}{end}."


def param(default: Any, help: str, **known: Any) -> Any:
    """A field of a dataclass, with its `Param`."""
    return field(default=default, metadata={"param": Param(help, **known)})


def param_of(spec: Field[Any]) -> Param:
    """Returns what `param` was given."""
    known: Param = spec.metadata["param"]
    return known


@dataclass(frozen=True, slots=True)
class LogitParams:
    """The parameters that plans and device tables carry.

    The floats of a stage are the columns of its device table, in this order. New ones of the same
    stage go after the last.
    """

    temperature: float = param(
        1.0, "0 is greedy", stage="filter", range=(0, MAX_FLOAT32),
        must="be >= 0 (0 is greedy), in float32", description="0 is greedy; default 1",
    )  # fmt: skip
    top_p: float = param(
        1.0, "Sample from the most likely tokens with this total probability", stage="filter",
        range=(POSITIVE, 1), must="be in (0, 1]", off=True,
    )  # fmt: skip
    top_k: int = param(
        -1, "Sample from this many most likely tokens; -1 or 0: all", stage="filter",
        range=(0, MAX_INT32), must="be >= 1, or -1 or 0 to switch it off, and fit in 32 bits",
    )  # fmt: skip
    min_p: float = param(
        0.0, "Least probability, relative to the most likely token", stage="filter",
        range=(0, 1), must="be in [0, 1]", off=True,
    )  # fmt: skip
    frequency_penalty: float = param(
        0.0, "Subtracted from a token's logit for each time that the output has it",
        stage="logits", range=(-2, 2), must="be in [-2, 2]", off=True,
    )  # fmt: skip
    presence_penalty: float = param(
        0.0, "Subtracted once from the logits of tokens in the output",
        stage="logits", range=(-2, 2), must="be in [-2, 2]", off=True,
    )  # fmt: skip
    repetition_penalty: float = param(
        1.0, "Above 1: less of the tokens in prompt and output",
        stage="logits", range=(MIN_REPETITION, 2), must=f"be in [{MIN_REPETITION:g}, 2]", off=True,
    )  # fmt: skip
    top_n_sigma: float = param(
        -1.0, "Keep logits within this many standard deviations of the largest; -1: all",
        stage="logits", range=(POSITIVE, MAX_FLOAT32),
        must="be > 0, or -1 to switch it off, in float32",
    )  # fmt: skip
    # (token id, bias); given as a mapping, whose keys may be strings of digits as in JSON.
    logit_bias: tuple[tuple[int, float], ...] = param(
        (), "TOKEN_ID:BIAS, added to the token's logit; may be repeated", stage="logits",
        description="Added to logits, by token id",
    )  # fmt: skip

    @property
    def edits(self) -> tuple[str, ...]:
        """Names of the parameters that change its logits; those at their default do not."""
        pairs = zip(_EDITS, _edits_of(self), _NO_EDITS, strict=True)
        return tuple(name for name, value, neutral in pairs if value != neutral)

    @property
    def penalized(self) -> bool:
        """Whether its logits are changed; asked of every request in every step."""
        return bool(_edits_of(self) != _NO_EDITS)

    def shared(self) -> dict[str, Any]:
        """Returns these parameters by name."""
        return {name: getattr(self, name) for name in _SHARED}

    def columns(self, stage: str) -> list[float]:
        """Returns the values of `columns_of(stage)`."""
        return [getattr(self, name) for name in columns_of(stage)]


@cache
def columns_of(stage: str) -> tuple[str, ...]:
    """Names of a stage's floats, by column of its device table."""
    known = [spec for spec in fields(LogitParams) if spec.type == "float"]
    return tuple(spec.name for spec in known if param_of(spec).stage == stage)


_SHARED = tuple(spec.name for spec in fields(LogitParams))
_EDITS = tuple(spec.name for spec in fields(LogitParams) if param_of(spec).stage == "logits")
_edits_of = attrgetter(*_EDITS)
_NO_EDITS = _edits_of(LogitParams())


def _unknown(given: Iterable[Any]) -> str | None:
    """What is wrong with the first name that is none of `SamplingParams`; None: nothing."""
    known = [f.name for f in fields(SamplingParams)]
    for name in given:
        if name not in known:
            return (
                refusal(str(name), known)
                or f"Unknown sampling parameter {shown(name)}.{nearest(str(name), known)}"
                f" Known: {', '.join(known)}."
            )
    return None


def _says_what_is_known(cls: type[T]) -> type[T]:
    """A keyword that does not exist is a `RequestError` that says what to use, no `TypeError`."""
    init = cls.__init__

    @wraps(init)
    def checked(self: T, /, *args: Any, **given: Any) -> None:
        try:
            init(self, *args, **given)
        except TypeError:
            if problem := _unknown(given):
                raise RequestError(problem) from None
            raise

    setattr(cls, "__init__", checked)  # noqa: B010  mypy refuses the assignment
    return cls


@_says_what_is_known
@dataclass(frozen=True, slots=True)
class SamplingParams(LogitParams):
    """Sampling parameters of one request.

    `logit_bias` and the penalties change the logits, in this order. With c the number of times that
    a token is in the output so far:

        logit += bias
        logit = logit / repetition if logit > 0 else logit * repetition   if c > 0 or in the prompt
        logit -= frequency * c + presence * (c > 0)

    Of what masks and these leave, `top_n_sigma` keeps the logits >= largest - n * sigma; sigma is
    the standard deviation of the finite logits (Tang et al. 2024, arXiv 2411.07641).

    Filters follow, in the order temperature, top-k, top-p, min-p. Temperature 0 is greedy.
    `sampling_seed` fixes the text: the noise is keyed by (seed, position), so it is the same with
    any drafter or none; a request without a seed gets one from the engine's `random_seed`.

    A grammar restricts every token to those with which the output can still match it. EOS is
    possible where the output is complete, and ends it. So `ignore_eos` and `min_new_tokens` only
    delay the end as long as the grammar allows another token.

    Raises:
        RequestError: a value is out of range, or two values contradict each other.
    """

    max_new_tokens: int = param(  # 0: only the prompt runs, for its log-probabilities
        128, "Maximum number of tokens to generate", range=(0, MAX_INT32),
        must="be >= 0 and fit in 32 bits", openai=None,
    )  # fmt: skip
    min_new_tokens: int = param(
        0, "Minimum number of tokens to generate", stage="mask", openai="min_tokens"
    )
    stop: tuple[str, ...] = param((), "Stop at this text; may be repeated")
    stop_token_ids: tuple[int, ...] = param((), "Stop at this token id; may be repeated")
    ignore_eos: bool = param(False, "Continue after the EOS token")
    n: int = param(
        1, "Completions per prompt", range=(1, MAX_SAMPLES),
        must=f"be >= 1 and at most {MAX_SAMPLES}", openai=None,
    )  # fmt: skip
    sampling_seed: int | None = param(
        None, "Seed; the text does not depend on the drafter", range=(-(2**63), 2**63 - 1),
        must="fit in 64 bits", openai="seed",
        description="Fixes the text, with any drafter or none",
    )  # fmt: skip
    skip_special_tokens: bool = param(True, "Omit special tokens from the text")
    speculative: bool = param(
        True, "Use the engine's drafts for this request",
        description="False: no drafts for this request",
    )  # fmt: skip
    max_draft_tokens: int | None = param(  # None: the engine's limit
        None, "Maximum drafts verified per step; default: no limit", range=(0, MAX_INT32),
        must="be >= 0 (0: no drafts) and fit in 32 bits",
        description="Most drafts verified per step",
    )  # fmt: skip
    # At most one grammar. Schemas and structural tags are JSON, as text or as a dict.
    json_schema: str | None = param(
        None, "JSON schema that the output must follow, on one line", stage="mask"
    )
    regex: str | None = param(
        None, "Regular expression that the whole output must match", stage="mask"
    )
    ebnf: str | None = param(
        None, "Grammar in GBNF that the output must follow; its first rule is root", stage="mask"
    )
    structural_tag: str | None = param(
        None, "Structural tag (JSON): free text with parts that follow grammars", stage="mask"
    )
    json_object: bool = param(False, "The output must be a JSON object", stage="mask", openai=None)

    def __post_init__(self) -> None:
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_ids(self.stop_token_ids))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        for name in KINDS:
            self._set(name, grammar_source(name, getattr(self, name)))
        grammar_of(self._grammar_params)  # refuses several
        for spec in fields(self):
            kind, _, optional = str(spec.type).partition(" | ")
            value = getattr(self, spec.name)
            if kind in _CHECKS and not (optional and value is None):
                self._set(spec.name, _CHECKS[kind](spec.name, value, RequestError))
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
        if problem := _unknown(value):
            raise RequestError(problem)
        return cls(**value)

    def _problems(self) -> Iterator[str]:
        """Values out of range or of the device tables' dtypes, and contradictions."""
        for spec in fields(self):
            value = getattr(self, spec.name)
            if problem := param_of(spec).problem(spec.name, value, spec.default):
                yield problem
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            yield (
                f"min_new_tokens must be in [0, max_new_tokens], got {shown(self.min_new_tokens)}"
                f" with max_new_tokens {self.max_new_tokens}."
            )
        if self.n > 1 and self.temperature == 0.0:
            yield "n > 1 with temperature 0 gives n equal texts; raise temperature or use n=1."


_CHECKS = {"float": number, "int": integer, "bool": boolean}


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
