"""How a request wants its tokens drawn, and when it ends (names as in SGLang)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from forerun.core.errors import RequestError, nearest

MAX_STOP_IDS = 16  # width of the device table that `min_new_tokens` reads


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Filters apply in the order temperature, top-k, top-p, min-p. Temperature 0 is greedy.
    `sampling_seed` fixes the text: the noise is keyed by (seed, position), so it is the same with
    any drafter or none; without a seed one is drawn per request.

    Raises:
        RequestError: a value out of range or a contradiction, saying the fix.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    speculative: bool = True  # False: this request takes no drafts, whatever the engine does
    max_draft_tokens: int | None = None  # drafts verified a step at most; None: the engine's

    def __post_init__(self) -> None:
        # Users pass a bare string or a list; both become tuples.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for problem in self._problems():
            raise RequestError(problem)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def draft_limit(self, drafts: int) -> int:
        """Drafts a step that this request takes, of the `drafts` that the engine makes."""
        if not self.speculative:
            return 0
        return drafts if self.max_draft_tokens is None else min(self.max_draft_tokens, drafts)

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
                    f"Unknown sampling parameter {key!r}.{nearest(str(key), known)}"
                    f" Known: {', '.join(known)}."
                )
        return cls(**value)

    def _problems(self) -> Sequence[str]:
        out: list[str] = []
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                return [f"{name} must be a number, got {value!r}."]
            if not math.isfinite(value):
                return [f"{name} must be finite, got {value}."]
        for name in ("top_k", "max_new_tokens", "min_new_tokens", "n"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                return [f"{name} must be an integer, got {value!r}."]
        if not isinstance(self.speculative, bool):
            return [f"speculative must be true or false, got {self.speculative!r}."]
        drafts = self.max_draft_tokens
        if drafts is not None and (isinstance(drafts, bool) or not isinstance(drafts, int)):
            return [f"max_draft_tokens must be an integer, got {drafts!r}."]
        if drafts is not None and drafts < 0:
            out.append(f"max_draft_tokens must be >= 0 (0: no drafts), got {drafts}.")
        if self.temperature < 0:
            out.append(f"temperature must be >= 0 (0 is greedy), got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            out.append(f"top_p must be in (0, 1], got {self.top_p}; 1 switches it off.")
        if self.top_k != -1 and self.top_k < 1:
            out.append(f"top_k must be >= 1, or -1 to switch it off, got {self.top_k}.")
        if not 0 <= self.min_p <= 1:
            out.append(f"min_p must be in [0, 1], got {self.min_p}; 0 switches it off.")
        if self.max_new_tokens < 1:
            out.append(f"max_new_tokens must be >= 1, got {self.max_new_tokens}.")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            out.append(
                f"min_new_tokens must be in [0, max_new_tokens], got {self.min_new_tokens} with"
                f" max_new_tokens {self.max_new_tokens}."
            )
        if self.n < 1:
            out.append(f"n must be >= 1, got {self.n}.")
        if self.n > 1 and self.temperature == 0.0:
            out.append(
                "n > 1 with temperature 0 gives n equal texts; raise temperature or use n=1."
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            out.append(f"stop must hold non-empty strings, got {self.stop!r}.")
        if any(isinstance(t, bool) or not isinstance(t, int) for t in self.stop_token_ids):
            out.append(f"stop_token_ids must hold integers, got {self.stop_token_ids!r}.")
        seed = self.sampling_seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            out.append(f"sampling_seed must be an integer, got {seed!r}.")
        elif seed is not None and not -(2**63) <= seed < 2**63:
            out.append(f"sampling_seed must fit in 64 bits, got {seed}.")
        return out
