"""The device's clock."""

from __future__ import annotations

from forerun.kernels import clock
from tests.kernels.compiled import Case

CASES = [
    Case(
        "stamp",
        clock._stamp,
        {"out": "*i64", "at": "i32"},
        {"AMD": False},
        options={"num_warps": 1},
        hip_constants={"AMD": True},
        hip_options={"num_warps": 1},
        wide=False,
    )
]
