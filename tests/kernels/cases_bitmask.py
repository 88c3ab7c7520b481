"""Masks of grammars."""

from __future__ import annotations

from forerun.kernels.sampling import bitmask
from tests.kernels.compiled import Case

CASES = [
    Case(
        f"mask tokens {kind}",
        bitmask._mask_tokens,
        {"logits": kind, "bitmask": "*i32", "rows": "*i32"}
        | dict.fromkeys(("vocab", "request_stride", "row_stride"), "i32")
        | dict.fromkeys(("bitmask_stride", "rows_stride", "width"), "i32"),
        {"BLOCK": bitmask.BLOCK},
        options={"num_warps": 4},
        multiples=("vocab", "request_stride", "row_stride"),
        wide=False,  # it reads a word for 32 tokens
    )
    for kind in ("*bf16", "*fp32")
]
