"""What confidences of drafts are worth: their reliability, and a logistic that corrects them.

A head is trained to foretell whether a draft equals a token of the target, under a label that is
neither greedy nor sampled decoding. So each mode is calibrated on what was accepted (Platt's
scaling):

    P(accepted) = σ(slope · logit(confidence) + intercept)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.core.plan import ConfidenceCounts

PRIOR_DRAFTS = 80.0  # how many drafts the untouched confidence counts as
LARGEST_LOGIT = 12.0
ITERATIONS = 20

Bins = Sequence[Sequence[float]]  # drafts, accepted ones, sum of confidences; by confidence


@dataclass(frozen=True)
class Calibration:
    """Corrects a confidence; with the defaults it stays as it is."""

    slope: float = 1.0
    intercept: float = 0.0

    def __call__(self, confidence: float) -> float:
        """Returns the probability that a draft of this confidence is accepted."""
        return _sigmoid(self.slope * _logit(confidence) + self.intercept)

    @classmethod
    def fit(cls, bins: Bins) -> Calibration:
        """Returns the most likely one, by Newton's method; drafts of a bin count as its mean.

        A Gaussian prior around (1, 0) weighs as much as `PRIOR_DRAFTS` drafts, so that few drafts
        change little.
        """
        points = [(_logit(total / n), n, hits) for n, hits, total in bins if n > 0]
        slope, intercept = 1.0, 0.0
        for _ in range(ITERATIONS if points else 0):
            ridge = PRIOR_DRAFTS / 4
            g0, g1 = -ridge * intercept, -ridge * (slope - 1)
            h00, h01, h11 = ridge, 0.0, ridge
            for x, n, hits in points:
                p = _sigmoid(slope * x + intercept)
                weight = n * p * (1 - p)
                g0, g1 = g0 + hits - n * p, g1 + (hits - n * p) * x
                h00, h01, h11 = h00 + weight, h01 + weight * x, h11 + weight * x * x
            det = h00 * h11 - h01 * h01
            step0, step1 = (h11 * g0 - h01 * g1) / det, (h00 * g1 - h01 * g0) / det
            scale = min(1.0, 2.0 / max(abs(step0), abs(step1), 1e-12))
            intercept, slope = intercept + scale * step0, slope + scale * step1
        return cls(slope, intercept)


def reliability(counts: ConfidenceCounts) -> dict[str, Any]:
    """The reliability of each mode that has drafts, for `/server_info`."""
    return {
        mode: _of_mode(bins) for mode, bins in asdict(counts).items() if any(n for n, *_ in bins)
    }


def _of_mode(bins: Bins) -> dict[str, Any]:
    drafts = sum(n for n, *_ in bins)
    calibration = Calibration.fit(bins)
    used = [(n, hits / n, total / n) for n, hits, total in bins if n]
    error = sum(n * abs(rate - mean) for n, rate, mean in used) / drafts
    calibrated = sum(n * abs(rate - calibration(mean)) for n, rate, mean in used) / drafts
    return {
        "drafts": int(drafts),
        "bins": [
            {"drafts": int(n), "mean_confidence": mean, "accepted": rate} for n, rate, mean in used
        ],
        "calibration": {"slope": calibration.slope, "intercept": calibration.intercept},
        "expected_calibration_error": error,
        "expected_calibration_error_calibrated": calibrated,
    }


def _logit(p: float) -> float:
    if p <= 0.0 or p >= 1.0:
        return -LARGEST_LOGIT if p <= 0.0 else LARGEST_LOGIT
    return max(-LARGEST_LOGIT, min(LARGEST_LOGIT, math.log(p / (1 - p))))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))
