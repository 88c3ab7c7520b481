"""What surrounds the products, at Qwen3-8B's shapes and at awkward ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.kernels import activation, argmax, commit, norm, qkv, sampling
from tests.kernels.compiled import TARGETS, Case

B16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"


def case(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    numbers: str,
    constants: dict[str, Any],
    warps: int,
    wide: bool = True,
) -> Case:
    """`numbers`: integer arguments; those that are strides of aligned rows end in `*`."""
    names = numbers.split()
    signature = pointers | {n.rstrip("*"): "i32" for n in names}
    if "eps" in kernel.fn.__code__.co_varnames:
        signature["eps"] = "fp32"
    return Case(
        name,
        kernel,
        signature,
        {"PDL": False, **constants},
        options={"num_warps": warps},
        hip_options={"num_warps": max(1, warps // 2)},  # waves of 64
        multiples=tuple(n.rstrip("*") for n in names if n.endswith("*")),
        wide=wide,
    )


def norms(name: str, x: str, block: int = 4096, **constants: Any) -> Case:
    pointers = {"x_ptr": x, "residual_ptr": B16, "weight_ptr": B16, "total_ptr": B16}
    numbers = "size* x_part* x_row* residual_row*"
    all_ = {"ADD": True, "PARTS": 1, "BLOCK": block, **constants}
    return case(name, norm._rms_norm, pointers | {"out_ptr": B16}, numbers, all_, block // 256)


def silu(name: str, x: str, parts: int) -> Case:
    constants = {"PARTS": parts, "BLOCK": 1024}
    pointers = {"x_ptr": x, "out_ptr": B16}
    return case(name, activation._silu_mul, pointers, "inner* x_part* x_row*", constants, 4)


def heads(name: str, x: str = B16, pool: str = B16, **constants: Any) -> Case:
    pointers = {
        "x_ptr": x, "q_norm": B16, "k_norm": B16, "table": B16, "positions": I32, "rows": I64,
        "q_ptr": B16, "k_pool": pool, "v_pool": pool,
    }  # fmt: skip
    all_ = {
        "new": None, "PARTS": 1, "HEADS": 32, "LAYERS": 1, "KV_HEADS": 8, "DIM": 128,
        "FP8": pool == "*u8", "GROUP": 8, "HALF": 64, **constants,
    }  # fmt: skip
    if all_["LAYERS"] > 1:
        all_["HEADS"] = 0
        del all_["new"]
        pointers["new"] = I32
    for absent in [n for n in pointers if n in all_]:
        del pointers[absent]
    numbers = "x_part* x_row* layer_stride* width"
    return case(name, qkv._kernel, pointers, numbers, all_, all_["GROUP"] * all_["HALF"] // 256)


COMMIT = {
    "draft_ptr": I64, "drawn_ptr": I64, "slots": I64, "start_ptr": I32, "kv_len": I32,
    "last_token": I64, "history": I32, "new_ptr": I32,
}  # fmt: skip

RULES = {"temperature": F32, "top_k": I64, "top_p": F32, "min_p": F32, "key": I64}
RULE_ROWS = "temperature_row min_p_row key_row"
CHOOSE = {"tops": F32, "largest": F32, "held": I32, "edge_ptr": I32, "out": I64, **RULES}
RACE = {"largest": F32, "edge_ptr": I32, "out": I64, "best_ptr": F32, "id_ptr": I32}
RACE |= {name: RULES[name] for name in ("temperature", "min_p", "key")}
ROWS = {"logits": B16, "positions": I32}

_CASES = [
    norms("add and norm", B16),
    norms("partial sums, add and norm", F32, PARTS=4),
    norms("norm", B16, ADD=False),
    norms("norm of 5120", B16, 8192),
    silu("silu", B16, 1),
    silu("silu of partial sums", F32, 4),
    heads("heads"),
    heads("heads of partial sums", F32, PARTS=4),
    heads("heads, float8 pool", pool="*u8"),
    heads("heads of 256 without norm", q_norm=None, k_norm=None, DIM=256, HALF=128, GROUP=4),
    heads("keys of 5 layers", LAYERS=5),
    case("argmax", argmax._best_of_part, {"logits": B16, "best_ptr": F32, "id_ptr": I32},
         "vocab* row_stride* span*", {"BLOCK": 2048}, 8),
    case("argmax, second", argmax._best_part, {"best_ptr": F32, "id_ptr": I32, "out": I64},
         "parts", {"BLOCK": 128}, 1, wide=False),
    case("accept and commit", commit._accept_commit, COMMIT,
         "draft_row drawn_row history_row nobody", {"forced": None, "WIDTH": 16, "BLOCK": 16}, 1,
         wide=False),
    case("hold stops", sampling._hold_stops, ROWS | {"stop_ids": I64, "min_position": I64},
         "row_stride* stops_row position_row width count", {"BLOCK": 16}, 1, wide=False),
    case("scan", sampling._scan, {"logits": B16, "tops": F32}, "vocab* row_stride* groups span*",
         {"GROUP": 128, "BLOCK": 2048}, 8),
    case("choose", sampling._choose, ROWS | CHOOSE,
         f"{RULE_ROWS} top_k_row top_p_row vocab* row_stride* groups width",
         {"GROUP": 128, "GROUPS": 2048, "BLOCK": 4096, "KEEP": 2048, "FEW": 256}, 16),
    case("race", sampling._race, ROWS | RACE,
         f"{RULE_ROWS} vocab* row_stride* width span*", {"BLOCK": 2048}, 8),
    case("finish", sampling._finish, {"best_ptr": F32, "id_ptr": I32, "out": I64}, "parts vocab",
         {"BLOCK": 128}, 1, wide=False),
]  # fmt: skip
RDNA = ("gfx1100",)  # waves of 32, as CUDA's
CASES = [replace(c, targets=tuple(t for t in TARGETS if t not in RDNA)) for c in _CASES]
CASES += [replace(c, targets=RDNA, hip_options={}) for c in _CASES]
