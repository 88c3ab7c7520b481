"""The reader that measures bandwidth."""

from __future__ import annotations

from forerun_bench import stream
from tests.kernels.compiled import Case

CASES = [
    Case(
        "read_sum",
        stream._read_sum,
        {"x": "*fp32", "out": "*fp32"},
        {"BLOCK": stream.BLOCK, "EACH": stream.EACH},
        options={"num_warps": stream.WARPS},
    )
]
