"""Drafts on their way to the verify pass; draft trees, and what a step does with them."""

from __future__ import annotations

from forerun.kernels.speculation import best_first, tree
from forerun.kernels.speculation import ring_buffer as keep
from forerun.kernels.speculation import verify_inputs as verify
from tests.kernels.compiled import Case

CASES = [
    *(
        Case(
            f"verify ids, {'a tree' if depth else 'a chain'}",
            verify._verify_ids,
            dict.fromkeys(("newest", "draft", "slots", "ids", "judged"), "*i64")
            | dict.fromkeys(("limits", "depth") if depth else ("limits",), "*i32")
            | dict.fromkeys(("draft_row", "depth_row", "vocab"), "i32"),
            ({} if depth else {"depth": None}) | {"WIDTH": 16, "BLOCK": 16, "PDL": False},
            options={"num_warps": 1},
            wide=False,
        )
        for depth in (False, True)
    ),
    *(
        Case(
            f"best_first {block}",
            best_first._best_first,
            {"scores": "*fp32", "ids": "*i64", "tokens": "*i64", "parents": "*i64"}
            | dict.fromkeys(("depth", "ranks", "nodes"), "i32"),
            {"BLOCK": block, "PDL": False},
            options={"num_warps": 1},
            wide=False,
        )
        for block in (32, 64)
    ),
    *(
        Case(
            f"log_probs {kind}",
            best_first._log_probs,
            {"logits": kind, "values": kind, "scores": "*fp32"}
            | dict.fromkeys(("row_stride", "vocab", "ranks"), "i32"),
            {"BLOCK": best_first.COLUMNS, "RANKS": 32, "PDL": False},
            options={"num_warps": 8},
            multiples=("row_stride", "vocab"),
        )
        for kind in ("*bf16", "*fp32")
    ),
    *(
        Case(
            f"shape {block}",
            tree._shape,
            {"parents": "*i64", "up_ptr": "*i64", "depth_ptr": "*i32", "bits_ptr": "*i64"}
            | {"parents_row": "i32", "rows": "i32"},
            {"BLOCK": block, "ROUNDS": block.bit_length() - 1, "PDL": False},
            options={"num_warps": 1},
            wide=False,
        )
        for block in (4, 64)
    ),
    *(
        Case(
            f"accept {block}",
            tree._accept,
            dict.fromkeys(("draft_ptr", "drawn_ptr", "up_ptr", "bits_ptr", "path_ptr"), "*i64")
            | {"depth_ptr": "*i32", "new_ptr": "*i32"}
            | dict.fromkeys(("draft_row", "drawn_row", "rows"), "i32"),
            {"BLOCK": block, "PDL": False},
            options={"num_warps": warps},
            wide=False,
        )
        for block, warps in ((16, 1), (64, 4))
    ),
    *(
        Case(
            f"move_rows {kind} {block}",
            tree._move_rows,
            {"data": kind, "rows_ptr": "*i64", "path_ptr": "*i64"}
            | {"layer_stride": "i64", "rows": "i32"},
            {"SIZE": 1024, "BLOCK": block, "CHUNK": tree.TILE // block},
            options={"num_warps": 4},
            multiples=("layer_stride",),
        )
        for kind in ("*bf16", "*u8", "*fp32")
        for block in (16, 64)
    ),
    *(
        Case(
            f"keep rows {kind}",
            keep._ring_buffer_write,
            {"ring": kind, "slots": "*i64", "positions": "*i32", "rows": kind}
            | {"size": "i32", "columns": "i32"},
            {"BLOCK": keep.COLUMNS, "PDL": False},
            multiples=("columns",),
        )
        for kind in ("*bf16", "*fp32")
    ),
]
