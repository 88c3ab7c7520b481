"""Biases and penalties."""

from __future__ import annotations

from forerun.kernels.sampling import penalties, top_n_sigma
from tests.kernels.compiled import Case

CASES = [
    Case(
        "top-n-sigma",
        top_n_sigma._keep_top_n_sigma,
        {"logits": "*fp32", "n": "*fp32", "vocab": "i32", "width": "i32"},
        {"UNITS": top_n_sigma.UNITS, "TINY": top_n_sigma.TINY, "BLOCK": top_n_sigma.BLOCK},
        options={"num_warps": 4},
        multiples=("vocab",),
    ),
    Case(
        "count tokens",
        penalties._count_tokens,
        {"positions": "*i32", "slots": "*i64", "ints": "*i32", "history": "*i32"}
        | {"bias_ids": "*i32", "biases": "*fp32", "words": "*i32", "bias": "*fp32"}
        | dict.fromkeys(("vocab", "positions_stride", "history_stride", "biases_stride"), "i32"),
        {"IN_PROMPT": penalties.IN_PROMPT, "BLOCK": penalties.BLOCK},
        options={"num_warps": 4},
        multiples=("history_stride", "biases_stride"),
        wide=False,
    ),
    *(
        Case(
            f"penalize {kind} {f'tree {tokens}' if tree else 'chain' if tokens > 1 else 'plain'}",
            penalties._penalize,
            {"logits": kind, "out": "*fp32", "words": "*i32", "bias": "*fp32"}
            | {"slots": "*i64", "floats": "*fp32"}
            | ({"drafts": "*i64"} if tokens > 1 else {})
            | ({"ancestors": "*i64"} if tree else {})
            | dict.fromkeys(
                ("vocab", "request_stride", "row_stride", "floats_stride", "num_tokens"), "i32"
            ),
            ({} if tree else {"ancestors": None})
            | ({} if tokens > 1 else {"drafts": None})
            | {"IN_PROMPT": penalties.IN_PROMPT, "BLOCK": penalties.BLOCK, "TOKENS": tokens}
            | {"WORDS": penalties.mask_words(tokens)},
            options={"num_warps": 4},
            multiples=("vocab", "request_stride", "row_stride"),
        )
        for kind in ("*bf16", "*fp32")
        for tokens, tree in ((1, False), (16, False), (64, True), (256, True))
    ),
]
