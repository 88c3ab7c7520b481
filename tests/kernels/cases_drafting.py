"""Candidates, walks and corrected logits of drafting heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from forerun.kernels.drafting import (
    best_token,
    confidence,
    convolution,
    gru,
    keys,
    top_columns,
    walk,
)
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.kernels.speculation import reliability
from tests.kernels.compiled import TARGETS, Case, on_each


def _on_tiles(
    name: str,
    kernel: Any,
    signature: dict[str, str],
    constants: Callable[[gru.Tile], dict[str, Any]],
    multiples: tuple[str, ...],
) -> list[Case]:
    """Cases of a kernel of Domino's recurrence, with the tiles of each number of requests."""

    def make(requests: int, name: str, targets: tuple[str, ...], gpu: GpuInfo) -> Case:
        tile = gru.tile_of(requests, gpu)
        blocks = {"BLOCK_B": tile.requests, "BLOCK_K": tile.block_bytes // 2}
        return Case(
            name,
            kernel,
            signature,
            constants(tile) | blocks,
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
            multiples=multiples,
            matrix=requests > 1,
            targets=targets,
        )

    return [
        case
        for requests in (1, 8, 16, 32)
        for case in on_each(f"{name}, {requests} requests", TARGETS, partial(make, requests))
    ]


CASES = [
    Case(
        "block maxima",
        top_columns._block_maxima,
        {"logits_ptr": "*bf16", "maxima_ptr": "*fp32"}
        | dict.fromkeys(("vocab", "stride", "blocks"), "i32"),
        {"BLOCKS": top_columns.BLOCKS_PER_CTA, "COLUMNS": top_columns.COLUMNS},
        options={"num_warps": 4},
        wide=False,
    ),
    *(
        Case(
            f"top columns, {most} at most",
            top_columns._top_columns,
            {"logits_ptr": "*bf16", "columns_ptr": "*i64"}
            | dict.fromkeys(("maxima_ptr", "values_ptr", "lse_ptr"), "*fp32")
            | dict.fromkeys(("vocab", "stride", "blocks", "k"), "i32"),
            {"K": most, "BLOCKS": 2048, "COLUMNS": top_columns.COLUMNS},
            options={"num_warps": 4},
            wide=False,
        )
        for most in (16, 32)  # of a head, of log-probabilities
    ),
    Case(
        "selector walk",
        walk._selector_walk,
        dict.fromkeys(("anchor_ptr", "candidates_ptr", "tokens_ptr"), "*i64")
        | dict.fromkeys(("projected_ptr", "before_ptr", "after_ptr"), "*bf16")
        | {"unary_ptr": "*fp32"}
        | dict.fromkeys(("depth", "k", "rank"), "i32"),
        {"K": 16, "RANK": 256},
        options={"num_warps": 8},
        multiples=("rank",),
    ),
    Case(
        "lattice walk",
        walk._lattice_walk,
        dict.fromkeys(("start_ptr", "out_ptr", "into_ptr"), "*bf16")
        | dict.fromkeys(("columns_ptr", "tokens_ptr"), "*i64")
        | dict.fromkeys(("depth", "slots", "k", "size"), "i32"),
        {"K": 8, "SIZE": 128},
        options={"num_warps": 4},
        multiples=("size",),
        wide=False,
    ),
    Case(
        "corrected",
        best_token._corrected,
        dict.fromkeys(("logits_ptr", "x_ptr", "weight_ptr", "table_ptr", "before_ptr"), "*bf16")
        | dict.fromkeys(("d2t_ptr", "anchor_ptr", "keys_ptr"), "*i64")
        | dict.fromkeys(("batch", "depth", "vocab", "row", "batch_stride", "row_stride"), "i32"),
        {
            "LOOK_UP": True,
            "RANK": 256,
            "BLOCK_B": 16,
            "BLOCK_V": best_token.BLOCK_V,
            "BACKWARD": True,
            "PREFETCH": 1024,
            "LINE": 64,
        },
        options={"num_warps": 4, "num_stages": 4},
        hip_constants={"BLOCK_V": best_token.BLOCK_V // 2, "PREFETCH": 512},
        hip_options={"num_stages": 2, "num_warps": 8},
        matrix=True,
        spill_bytes=400,  # gfx1100; the others have none
    ),
    Case(
        "look up",
        best_token._look_up,
        dict.fromkeys(("table_ptr", "before_ptr"), "*bf16")
        | dict.fromkeys(("anchor_ptr", "keys_ptr"), "*i64")
        | dict.fromkeys(("depth", "row"), "i32"),
        {"RANK": 256},
        options={"num_warps": 1},
        wide=False,
    ),
    Case(
        "tokens of keys",
        keys._tokens_of_keys,
        dict.fromkeys(("keys_ptr", "out_ptr"), "*i64") | dict.fromkeys(("batch", "depth"), "i32"),
        {"BLOCK": keys.BLOCK},
        options={"num_warps": 4},
        wide=False,
    ),
    Case(
        "pooled",
        best_token._pooled,
        dict.fromkeys(("logits_ptr", "x_ptr", "weight_ptr"), "*bf16")
        | dict.fromkeys(("columns_ptr", "tokens_ptr", "keys_ptr"), "*i64")
        | dict.fromkeys(("row", "places", "size", "stride"), "i32"),
        {"SIZE": 256, "BLOCK": best_token.POOL_BLOCK},
        options={"num_warps": 4},
        multiples=("size",),
    ),
    *_on_tiles(
        "GRU step",
        gru._gru_step,
        dict.fromkeys(("x_ptr", "state_ptr", "of_input_ptr", "of_state_ptr", "out_ptr"), "*bf16")
        | dict.fromkeys(("first_ptr", "keys_ptr"), "*i64")
        | dict.fromkeys(("batch", "row", "inputs", "size"), "i32"),
        lambda tile: {"LOOK_UP": True, "ZEROS": False, "UNITS": tile.rows // gru.GATES},
        ("inputs", "size"),
    ),
    *_on_tiles(
        "SiLU of state",
        gru._silu_of_state,
        dict.fromkeys(("base_ptr", "state_ptr", "weight_ptr", "out_ptr"), "*bf16")
        | dict.fromkeys(("batch", "outputs", "size", "base_stride", "weight_stride"), "i32"),
        lambda tile: {"OUTPUTS": tile.rows // 2},
        ("outputs", "size", "base_stride", "weight_stride"),
    ),
    Case(
        "convolve rows",
        convolution._convolve_rows,
        dict.fromkeys(("x_ptr", "base_ptr", "dynamic_ptr", "out_ptr"), "*bf16")
        | dict.fromkeys(("rows", "size", "groups", "group_size", "row_stride"), "i32"),
        {"TAPS": 2, "BLOCK": convolution.BLOCK},
        options={"num_warps": 4},
        wide=False,
    ),
    Case(
        "confidences",
        confidence._confidences,
        dict.fromkeys(("hidden_ptr", "more_ptr", "weight_ptr", "bias_ptr"), "*bf16")
        | {"out_ptr": "*fp32"}
        | dict.fromkeys(("size", "more_size", "batch_stride", "row_stride"), "i32"),
        {"BLOCK": confidence.BLOCK},
        options={"num_warps": 4},
        multiples=("size", "more_size", "batch_stride", "row_stride"),
    ),
    Case(
        "reliability",
        reliability._count_reliability,
        {"counts_ptr": "*fp64", "confidence_ptr": "*fp32", "slots_ptr": "*i64"}
        | {"temperature_ptr": "*fp32"}
        | dict.fromkeys(("committed_ptr", "limits_ptr", "widths_ptr"), "*i32")
        | dict.fromkeys(("total", "depth", "temperature_stride", "padding_slot"), "i32"),
        {"BINS": 10, "BLOCK": reliability.BLOCK},
        options={"num_warps": 4},
        wide=False,
    ),
]
