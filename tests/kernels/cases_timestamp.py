"""Device timestamps."""

from __future__ import annotations

from forerun.kernels.runtime import timestamp
from tests.kernels.compiled import Case

CASES = [
    Case(
        "write_timestamp",
        timestamp._timestamp_kernel,
        {"out": "*i64", "index": "i32"},
        {"AMD": False},
        options={"num_warps": 1},
        hip_constants={"AMD": True},
        hip_options={"num_warps": 1},
        wide=False,
    )
]
