"""Acceptance statistics over any number of requests.

Names and identities are SGLang's: with h[a] the steps that accepted a drafts,
sum(h) = verify steps, sum(a * h[a]) = correct drafts, and accept length = tokens / verify steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`histogram[a]` counts the verify steps that accepted `a` drafts."""

    completion_tokens: int = 0
    verify_ct: int = 0
    proposed: int = 0
    histogram: tuple[int, ...] = ()

    @classmethod
    def of(cls, meta_info: Mapping[str, Any]) -> Acceptance:
        """Reads the `meta_info` of one finished request."""
        return cls(
            completion_tokens=int(meta_info["completion_tokens"]),
            verify_ct=int(meta_info["spec_verify_ct"]),
            proposed=int(meta_info["spec_num_proposed_drafts"]),
            histogram=tuple(meta_info["spec_correct_drafts_histogram"]),
        )

    @classmethod
    def total(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """The sum; every verify step has the same weight, whichever request it served."""
        whole = cls()
        for part in parts:
            pairs = zip_longest(whole.histogram, part.histogram, fillvalue=0)
            whole = cls(
                completion_tokens=whole.completion_tokens + part.completion_tokens,
                verify_ct=whole.verify_ct + part.verify_ct,
                proposed=whole.proposed + part.proposed,
                histogram=tuple(a + b for a, b in pairs),
            )
        return whole

    @property
    def correct(self) -> int:
        return sum(accepted * steps for accepted, steps in enumerate(self.histogram))

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step, bonus token included; None before any step."""
        return self.completion_tokens / self.verify_ct if self.verify_ct else None

    @property
    def accept_rate(self) -> float | None:
        """Fraction of the proposed drafts that were accepted; None without any."""
        return self.correct / self.proposed if self.proposed else None

    @property
    def per_position(self) -> list[float]:
        """Fractions of verify steps: at k - 1 those that accepted draft k, and so all before it."""
        if not self.verify_ct:
            return []
        offered = math.ceil(self.proposed / self.verify_ct)  # the histogram ends at the deepest hit
        deep = [sum(self.histogram[k:]) for k in range(1, max(offered + 1, len(self.histogram)))]
        return [steps / self.verify_ct for steps in deep]

    def as_dict(self) -> dict[str, Any]:
        return {
            "accept_length": self.accept_length,
            "accept_rate": self.accept_rate,
            "acceptance_per_position": self.per_position,
            "completion_tokens": self.completion_tokens,
            "verify_ct": self.verify_ct,
            "proposed_drafts": self.proposed,
            "correct_drafts": self.correct,
            "histogram": list(self.histogram),
        }
