"""The device's clock."""

from __future__ import annotations

from forerun.kernels.runtime import timestamp as clock
from tests.kernels.compiled import Case

CASES = [
    Case(
        "write_timestamp",
        clock._stamp,
        {"out": "*i64", "at": "i32"},
        {"AMD": False},
        options={"num_warps": 1},
        hip_constants={"AMD": True},
        hip_options={"num_warps": 1},
        wide=False,
    )
]
