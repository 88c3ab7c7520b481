"""Cases of linear attention: Qwen3.5's heads, decode and a verify pass of 16 tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.kernels.linear_attention import causal_conv, gated_delta, gated_norm, replay
from tests.kernels.compiled import TARGETS, Case

B16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
HEADS: dict[str, Any] = {"K_HEADS": 16, "V_HEADS": 32, "K_DIM": 128, "V_DIM": 128}
SLOTS = {"slots": I64, "num_pending": I32}


def update(tokens: int, tree: bool = False, ragged: bool = False) -> list[Case]:
    kind = "up to " * ragged + "tree of " * tree
    given = {"parents": (I64, tree), "first_rows": (I32, ragged)}
    pointers = {name: pointer for name, (pointer, there) in given.items() if there}
    constants = dict.fromkeys(name for name, (_, there) in given.items() if not there)
    conv = Case(
        f"causal conv, {kind}{tokens} tokens",
        causal_conv._causal_conv_update,
        {"x_ptr": B16, "weight_ptr": B16, **SLOTS, "state": B16, "inputs": B16, "out_ptr": B16}
        | pointers
        | dict.fromkeys(("row_stride", "channels", "width"), "i32"),
        {"NUM_TOKENS": tokens, "SIZE": 4, "BLOCK": causal_conv.BLOCK, "PDL": False} | constants,
        {"num_warps": 1},
        multiples=("row_stride", "channels"),
        wide=False,
    )
    delta = Case(
        f"gated delta, {kind}{tokens} tokens",
        gated_delta._gated_delta_update,
        dict.fromkeys(("qkv", "a_ptr", "b_ptr", "out_ptr"), B16)
        | dict.fromkeys(
            ("decay_ptr", "dt_bias_ptr", "state", "k_kept", "delta_kept", "g_kept"), F32
        )
        | {**SLOTS, "num_passes": I32}
        | pointers
        | dict.fromkeys(("a_stride", "b_stride", "width"), "i32"),
        {
            **HEADS,
            **constants,
            "NUM_TOKENS": tokens,
            "EPS": gated_delta.EPS,
            "BLOCK_K": 128,
            "BLOCK_V": gated_delta.BLOCK_V,
            "PDL": False,
        },
        {"num_warps": 1},
        hip_constants={"BLOCK_V": gated_delta.HIP_BLOCK_V},
    )
    return [conv, delta]


def replays() -> list[Case]:
    rows = {"slots": I64, "rows": I64, "counts": I32}
    sizes = dict.fromkeys(("num_slots", "num_rows", "width"), "i32")
    return [
        Case(
            "causal conv, replay",
            replay._replay_conv,
            {**rows, "state": B16, "inputs": B16, "snapshots": B16, **sizes, "channels": "i32"},
            {"BEFORE": 3, "BLOCK": causal_conv.BLOCK},
            {"num_warps": 1},
            multiples=("channels",),
            wide=False,
        ),
        Case(
            "gated delta, replay",
            replay._replay_gated_delta,
            {**rows, "num_passes": I32}
            | dict.fromkeys(("state", "k_kept", "delta_kept", "g_kept", "snapshots"), F32)
            | sizes,
            {
                **HEADS,
                "BLOCK_K": 128,
                "BLOCK_V": gated_delta.BLOCK_V,
            },
            {"num_warps": 1},
            hip_constants={"BLOCK_V": gated_delta.HIP_BLOCK_V},
        ),
    ]


def prefill() -> list[Case]:
    gates = dict.fromkeys(("qkv", "a_ptr", "b_ptr", "inverses"), B16)
    gates |= dict.fromkeys(("decay_ptr", "dt_bias_ptr"), F32)
    strides = {"a_stride": "i32", "b_stride": "i32"}
    sizes = {**HEADS, "EPS": gated_delta.EPS, "CHUNK": 64, "BLOCK_K": 128}
    return [
        Case(
            "causal conv, prefill",
            causal_conv._causal_conv_prefill,
            {"x_ptr": B16, "weight_ptr": B16, "slots": I64, "chunks": I32, "state": B16}
            | {"out_ptr": B16, "row_stride": "i32", "channels": "i32"},
            {"SIZE": 4, "CHUNK": 64, "BLOCK": causal_conv.PREFILL_BLOCK},
            {"num_warps": 4},
            multiples=("row_stride", "channels"),
        ),
        Case(
            "gated delta, systems",
            gated_delta._invert_systems,
            gates | {"chunks": I32} | strides,
            sizes,
            {"num_warps": gated_delta.PREFILL_WARPS},
            hip_options={"num_warps": gated_delta.HIP_PREFILL_WARPS},
            matrix=True,
        ),
        Case(
            "gated delta, prefill",
            gated_delta._gated_delta_prefill,
            gates | {"slots": I64, "requests": I32, "state": F32, "out_ptr": B16} | strides,
            {**sizes, "BLOCK_V": gated_delta.PREFILL_BLOCK_V},
            {"num_warps": gated_delta.PREFILL_WARPS, "num_stages": 1},
            hip_options={"num_warps": gated_delta.HIP_PREFILL_WARPS},
            matrix=True,
            spill_bytes=40,
        ),
    ]


def fixed_order() -> list[Case]:
    """Without products that the compiler fuses."""
    options = {"num_warps": 1, "enable_fp_fusion": False}
    _, step = update(16)
    own = replace(step, name="gated delta, 16 tokens, fixed order", options=options)
    pointers = dict.fromkeys(("qkv", "a_ptr", "b_ptr", "out_ptr"), B16)
    pointers |= dict.fromkeys(("decay_ptr", "dt_bias_ptr", "state"), F32)
    by_token = Case(
        "gated delta, prompts by token",
        gated_delta._gated_delta_tokens,
        pointers | {"slots": I64, "requests": I32, "a_stride": "i32", "b_stride": "i32"},
        {**HEADS, "EPS": gated_delta.EPS, "BLOCK_K": 128, "BLOCK_V": gated_delta.BLOCK_V},
        options,
        hip_constants={"BLOCK_V": gated_delta.HIP_BLOCK_V},
    )
    return [own, by_token]


RDNA = ("gfx1100",)  # few registers: the state's tile does not fit beside a chunk's
PREFILL = prefill()
CASES = [
    *PREFILL[:2],
    replace(PREFILL[2], targets=tuple(t for t in TARGETS if t not in RDNA)),
    replace(PREFILL[2], targets=RDNA, spill_bytes=1024),
    *update(1),
    *update(16),
    *update(16, ragged=True),
    *update(33, tree=True),
    *update(33, tree=True, ragged=True),
    *replays(),
    *fixed_order(),
    Case(
        "gated norm",
        gated_norm._gated_rms_norm,
        {"x_ptr": B16, "z_ptr": B16, "weight_ptr": B16, "out_ptr": B16}
        | {"heads": "i32", "z_stride": "i32", "eps": "fp32"},
        {"DIM": 128, "GROUP": gated_norm.GROUP, "BLOCK": 128, "PDL": False},
        {"num_warps": 1},
        multiples=("heads", "z_stride"),
    ),
]
