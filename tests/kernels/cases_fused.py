"""Everything but GEMM and attention, at Qwen3-8B's shapes and at awkward ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.kernels.elementwise import gated_act as activation
from forerun.kernels.elementwise import qk_norm_rope as qkv
from forerun.kernels.elementwise import quantize_fp8, value_norm
from forerun.kernels.elementwise import rms_norm as norm
from forerun.kernels.sampling import argmax, candidates, sample, sample_own, thresholds
from forerun.kernels.speculation import accept, decode_inputs
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
        constants,
        options={"num_warps": warps},
        hip_options={"num_warps": max(1, warps // 2)},  # waves of 64
        multiples=tuple(n.rstrip("*") for n in names if n.endswith("*")),
        wide=wide,
    )


def norms(name: str, x: str, block: int = 4096, weight: str = B16, **constants: Any) -> Case:
    pointers = {"x_ptr": x, "residual_ptr": B16, "weight_ptr": weight, "total_ptr": B16}
    numbers = "size* split_stride* row_stride* residual_stride*"
    all_ = {"ADD": True, "SPLIT_K": 1, "BLOCK": block, **constants}
    warps = min(16, block // 256)
    if all_["SPLIT_K"] == 1 and block <= 4096:
        warps //= 4
    return case(name, norm._rms_norm, pointers | {"out_ptr": B16}, numbers, all_, warps)


def gated(name: str, x: str, parts: int = 1, gelu: bool = False) -> Case:
    constants = {"SPLIT_K": parts, "GELU": gelu, "BLOCK": 2048}
    pointers = {"x_ptr": x, "out_ptr": B16}
    return case(
        name, activation._act_mul, pointers, "inner* split_stride* row_stride*", constants, 8
    )


def quantize(name: str, interleaved: bool) -> Case:
    pointers = {"x_ptr": B16, "out_ptr": "*u8", "scales_ptr": F32}
    constants = {"INTERLEAVED": interleaved, "NATIVE": False, "BLOCK": 1024}
    return case(name, quantize_fp8._quantize_tokens, pointers, "k* row_stride*", constants, 4)


def quantize_short(name: str, interleaved: bool) -> Case:
    pointers = {"x_ptr": B16, "out_ptr": "*u8", "scales_ptr": F32}
    constants = {"INTERLEAVED": interleaved, "NATIVE": False, "ROWS": 4, "BLOCK_K": 1024}
    kernel, warps = quantize_fp8._quantize_short_tokens, quantize_fp8.ROWS_WARPS
    return case(name, kernel, pointers, "tokens k* row_stride*", constants, warps)


def dequantize(name: str, interleaved: bool) -> Case:
    pointers = {"values": "*u8", "scales": F32, "out": B16}
    numbers, constants = "k* group* num_groups", {"INTERLEAVED": interleaved, "BLOCK": 1024}
    return case(name, quantize_fp8._dequantize_weight, pointers, numbers, constants, 4, wide=False)


def heads(name: str, x: str = B16, pool: str = B16, **constants: Any) -> Case:
    pointers = {
        "x_ptr": x, "q_norm": B16, "k_norm": B16, "table": B16, "positions": I32, "kv_slots": I64,
        "q_ptr": B16, "k_pool": pool, "v_pool": pool,
    }  # fmt: skip
    all_ = {
        "num_valid": None, "SPLIT_K": 1, "HEADS": 32, "LAYERS": 1, "KV_HEADS": 8, "DIM": 128,
        "FP8": pool == "*u8", "TOKENS_BLOCK": 1, "GROUP": 8, "HALF": 64, **constants,
    }  # fmt: skip
    if all_["LAYERS"] > 1:
        all_["HEADS"] = 0
        del all_["num_valid"]
        pointers["num_valid"] = I32
    for absent in [n for n in pointers if n in all_]:
        del pointers[absent]
    numbers = "num_tokens split_stride* row_stride* layer_stride* tokens_per_request"
    warps = all_["TOKENS_BLOCK"] * all_["GROUP"] * all_["HALF"] // 512
    return case(name, qkv._qk_norm_rope_write, pointers, numbers, all_, warps)


COMMIT = {
    "candidates": I64, "sampled": I64, "slots": I64, "start_ptr": I32, "kv_len": I32,
    "last_token": I64, "history": I32, "committed_ptr": I32, "ids_ptr": I64,
}  # fmt: skip
COMMIT_STRIDES = "candidates_stride sampled_stride history_stride padding_slot"
DECODE_INPUTS = {
    "slots": I64, "kv_len": I32, "last_token": I64, "page_table": I32, "start_out": I32,
    "last_token_out": I64, "positions": I32, "next_positions": I32, "kv_slots": I64,
    "page_table_out": I32,
}  # fmt: skip

PARAMS = {"slots": I64, "floats": F32, "ints": I64}
PARAM_STRIDES = "vocab* row_stride* floats_stride ints_stride num_groups rows_per_request"
TOP_P = {"part_weights": I64, "state": I64, "histograms": I64, "counts": I32}
LOGITS = {"logits": B16, "positions": I32}
CANDIDATES = LOGITS | PARAMS | {
    "group_max": F32, "max_logit_ptr": F32, "scratch": I32, "threshold": I32, "out": I64,
}  # fmt: skip
OWN_CANDIDATES = {"logits": B16, "group_max": F32, "max_logit_ptr": F32} | PARAMS | {
    "scratch": I32, "todo": I64, "best": I32,
}  # fmt: skip
OWN_BEST = {"score_ptr": F32, "id_ptr": I32, "best": I32}
CHOOSE = {"best": I32, "max_logit_ptr": F32, "out": I64, "positions": I32} | PARAMS
CHOOSE_NUMBERS = "count per_rank vocab* floats_stride ints_stride rows_per_request"
THRESHOLD = {
    "logits": B16, "slots": I64, "floats": F32, "max_logit_ptr": F32, "threshold": I32,
    "state": I64,
}  # fmt: skip
THRESHOLD_STRIDES = "vocab* row_stride* floats_stride rows_per_request part_size*"
TOKENS = {"INVALID": -1, "PENDING": -2}


def sample_candidates(name: str, **constants: Any) -> Case:
    all_ = {
        **TOKENS, "GROUP_SIZE": 128, "GROUPS_BLOCK": 2048, "BLOCK": 2048, "MAX_CANDIDATES": 512,
        "MAX_TOP_K_GROUPS": 256, "TOP_P_GROUPS": 128, "TOP_P": True, "MAX_PARTS": 64,
        "NUM_BINS": 4096, "STATE_SIZE": 6, "LAST_BINS": 16, **constants,
    }  # fmt: skip
    pointers = CANDIDATES | TOP_P
    if not all_["TOP_P"]:
        pointers = CANDIDATES
        all_ |= dict.fromkeys(TOP_P)
    kernel = candidates.sample_candidates
    return case(name, kernel, pointers, f"{PARAM_STRIDES} num_parts", all_, 8)


def sample_parts(name: str, *absent: str) -> Case:
    """`absent`: those of the three pointers that are None."""
    pointers = LOGITS | PARAMS | {
        "group_max": F32, "max_logit_ptr": F32, "threshold": I32, "out": I64, "score_ptr": F32,
        "id_ptr": I32,
    }  # fmt: skip
    for each in absent:
        del pointers[each]
    constants = {**TOKENS, "GROUPS_BLOCK": 2048, "BLOCK": 2048, **dict.fromkeys(absent)}
    numbers = f"{PARAM_STRIDES} first_id part_size*"
    return case(name, sample.sample_parts, pointers, numbers, constants, 8)


def radix_digit(level: int) -> Case:
    constants = {
        "LEVEL": level, "NUM_BINS": 4096, "BINS_PER_LINE": 64, "STATE_SIZE": 6, "BLOCK": 2048,
    }  # fmt: skip
    pointers = THRESHOLD | {"histograms": I64}
    kernel = thresholds._radix_digit
    return case(f"radix digit {level}", kernel, pointers, THRESHOLD_STRIDES, constants, 8)


_CASES = [
    norms("add and norm", B16),
    norms("split-K partials, add and norm", F32, SPLIT_K=4),
    norms("outputs of 8 experts, add and norm", F32, 2048, SPLIT_K=8),
    norms("outputs of 8 experts in bfloat16, add and norm", B16, 2048, SPLIT_K=8),
    norms("norm", B16, ADD=False),
    norms("norm of 5120", B16, 8192),
    norms("add and norm, float32 weight", B16, weight=F32),
    gated("silu", B16),
    quantize("quantize tokens", False),
    quantize("quantize tokens, interleaved", True),
    quantize_short("quantize short tokens", False),
    quantize_short("quantize short tokens, interleaved", True),
    dequantize("dequantize a weight", False),
    dequantize("dequantize a weight, interleaved", True),
    gated("silu of split-K partials", F32, 4),
    gated("gelu", B16, gelu=True),
    case("norm of value heads", value_norm._norm_values, {"x_ptr": B16}, "first* row_stride*",
         {"DIM": 512, "BLOCK": 512}, 2),
    heads("heads"),
    heads("heads of split-K partials", F32, SPLIT_K=4),
    heads("heads, float8 pool", pool="*u8"),
    heads("heads of 256 without norm", q_norm=None, k_norm=None, DIM=256, HALF=128, GROUP=4),
    heads("keys of 5 layers", LAYERS=5),
    heads("heads of many tokens", TOKENS_BLOCK=4),
    case("argmax of parts", argmax._argmax_part, {"logits": B16, "keys": I64},
         "vocab* row_stride* num_parts", {"BLOCK": 8192}, 4),
    case("argmax over parts", argmax._argmax_reduce, {"keys": I64, "out": I64},
         "num_parts first_id", {"INVALID": -1, "KEYS": False, "BLOCK": 128}, 1, wide=False),
    case("argmax keys over parts", argmax._argmax_reduce, {"keys": I64, "out": I64},
         "num_parts first_id", {"INVALID": -1, "KEYS": True, "BLOCK": 128}, 1, wide=False),
    case("decode inputs", decode_inputs._build_decode_inputs, DECODE_INPUTS,
         "page_table_stride* pages*",
         {"NUM_TOKENS": 16, "PAGE_SIZE": 16, "TOKENS_BLOCK": 16, "BLOCK": 1024}, 4),
    case("accept and commit", accept._accept_commit, COMMIT, COMMIT_STRIDES,
         {"num_committed": None, "NUM_TOKENS": 16, "BLOCK": 16}, 1, wide=False),
    case("commit a given count", accept._accept_commit, COMMIT | {"num_committed": I32},
         COMMIT_STRIDES, {"NUM_TOKENS": 16, "BLOCK": 16}, 1, wide=False),
    case("mask stop tokens", sample._mask_stop_tokens, LOGITS | {"slots": I64, "ints": I64},
         "row_stride* ints_stride rows_per_request count first_id vocab*", {"BLOCK": 16}, 1,
         wide=False),
    case("group max", sample._group_max, {"logits": B16, "group_max": F32},
         "vocab* row_stride* num_groups part_size*", {"GROUP_SIZE": 128, "BLOCK": 2048}, 8),
    case("sum of part weights", thresholds.sum_part_weights,
         {"logits": B16, "group_max": F32, **PARAMS, "part_weights": I64},
         f"{PARAM_STRIDES} part_size*", {"GROUPS_BLOCK": 2048, "BLOCK": 2048}, 8),
    sample_candidates("sample candidates"),
    sample_candidates("sample candidates without top-p", TOP_P=False),
    radix_digit(0),
    radix_digit(1),
    case("last digit", thresholds._last_digit, THRESHOLD | {"counts": I32}, THRESHOLD_STRIDES,
         {"MAX_PARTS": 64, "LAST_BINS": 16, "STATE_SIZE": 6, "BLOCK": 2048}, 8),
    sample_parts("sample parts, filtered", "max_logit_ptr"),
    sample_parts("sample parts", "max_logit_ptr", "threshold", "out"),
    sample_parts("sample parts of a rank", "threshold"),
    sample_parts("sample parts of a rank without top-k", "threshold", "out"),
    case("candidates of a rank", sample_own._own_candidates, OWN_CANDIDATES,
         f"{PARAM_STRIDES} first_id",
         {"PENDING": -2, "COLUMNS": 64, "GROUP_SIZE": 128, "GROUPS_BLOCK": 1024, "BLOCK": 2048,
          "MAX_CANDIDATES": 512}, 8),
    case("best of a rank", sample_own._own_best, OWN_BEST | {"todo": I64}, "num_parts columns",
         {"PENDING": -2, "BLOCK": 128}, 1, wide=False),
    case("best of a rank without top-k", sample_own._own_best, OWN_BEST, "num_parts columns",
         {"todo": None, "PENDING": -2, "BLOCK": 128}, 1, wide=False),
    case("choose among ranks", sample_own._choose, CHOOSE, CHOOSE_NUMBERS,
         {"INVALID": -1, "PENDING": -2, "TOP_K": True, "MAX_CANDIDATES": 128}, 4, wide=False),
    case("choose among ranks without top-k", sample_own._choose, CHOOSE, CHOOSE_NUMBERS,
         {"INVALID": -1, "PENDING": -2, "TOP_K": False, "MAX_CANDIDATES": 2}, 4, wide=False),
    case("reduce parts", sample._reduce_parts, {"score_ptr": F32, "id_ptr": I32, "out": I64},
         "num_parts vocab", {"PENDING": -2, "FILTERED": True, "BLOCK": 128}, 1, wide=False),
]  # fmt: skip
RDNA = ("gfx1100",)  # waves of 32, as CUDA's
CASES = [replace(c, targets=tuple(t for t in TARGETS if t not in RDNA)) for c in _CASES]
CASES += [replace(c, targets=RDNA, hip_options={}) for c in _CASES]
