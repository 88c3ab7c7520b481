"""Dividing verified tokens among requests, and the estimates that it follows."""

from __future__ import annotations

from forerun.speculative.ragged import allocate, estimator
from tests.kernels.compiled import Case

TABLES = dict.fromkeys(
    ("accepted_ptr", "logit_ptr", "count_ptr", "prior_ptr", "slope_ptr"), "*fp32"
)


def tables(confidence: bool) -> dict[str, str]:
    return TABLES | ({"confidence": "*fp32"} if confidence else {})


def absent(confidence: bool) -> dict[str, None]:
    return {} if confidence else {"confidence": None}


CASES = [
    *(
        Case(
            f"tokens of {batch} requests",
            allocate._allocate,
            {"survival": "*fp32", "widths": "*i32"}
            | dict.fromkeys(("wanted", "batch", "num_drafts", "row_stride"), "i32"),
            {"DRAFTS": 16, "BATCH": batch, "ONE": allocate._ONE},
            options={"num_warps": min(max(batch // 32, 1), 16)},
            wide=False,
            spill_bytes=8,
        )
        for batch in (1, 256, 1024)
    ),
    *(
        Case(
            f"survival, {'with' if confidence else 'without'} confidences",
            estimator._survival,
            {"slots": "*i64", "limits": "*i32", "out": "*fp32"}
            | tables(confidence)
            | dict.fromkeys(("num_drafts", "global_row", "confidence_stride"), "i32"),
            {"DRAFTS": 16} | estimator._CONSTANTS | absent(confidence),
            options={"num_warps": 1},
            wide=False,
        )
        for confidence in (False, True)
    ),
    *(
        Case(
            f"update, {'with' if confidence else 'without'} confidences",
            estimator._update,
            {"slots": "*i64", "widths": "*i32", "committed_ptr": "*i32", "counts_ptr": "*i64"}
            | tables(confidence)
            | dict.fromkeys(("batch", "num_drafts", "global_row", "confidence_stride"), "i32"),
            {"DRAFTS": 16, "ROWS": 16}
            | estimator._UPDATE_CONSTANTS
            | estimator._CONSTANTS
            | absent(confidence),
            options={"num_warps": 4},
            wide=False,
            spill_bytes=8,
        )
        for confidence in (False, True)
    ),
]
