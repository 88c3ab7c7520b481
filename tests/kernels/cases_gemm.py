"""The few-row products, every form of them."""

from __future__ import annotations

from dataclasses import replace

from forerun.kernels.gemm import triton_kernels as gemm_kernels
from tests.kernels.compiled import CUDA, Case

TENSORS = {"x": "*bf16", "w": "*bf16", "locks": "*i32"}
ABSENT = dict.fromkeys(
    ("bias", "squares", "residual", "norm_weight", "out", "scaled", "out_squares", "best",
     "best_ids", "partial")
)  # fmt: skip
SCALARS = dict.fromkeys(
    (
        "M",
        "N",
        "K",
        "stride_x",
        "P",
        "tiles_m",
        "units",
        "prefetch",
    ),
    "i32",
)
SCALARS["eps"] = "fp32"
OUT = {"out": "*bf16"}
PARTIAL = {"partial": "*fp32"}
SQUARES = {"squares": "*fp32"}
SUM = {"residual": "*bf16", "norm_weight": "*bf16", "scaled": "*bf16", "out_squares": "*fp32"}
BEST = {"best": "*fp32", "best_ids": "*i32"}


def case(name: str, tensors: dict[str, str], **constants: int | bool) -> Case:
    base = {
        "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "PARTS": 1, "EARLY": True, "SWAP": False,
        "PAIRED": False, "PARTIALS": False, "EVEN_K": True, "THREADS": 128, "PDL": False,
    }  # fmt: skip
    absent = {name: None for name in ABSENT if name not in tensors}
    return Case(
        name,
        gemm_kernels.gemm_kernel,
        TENSORS | tensors | SCALARS,
        absent | base | constants,
        options={"num_warps": 4, "num_stages": 4},
        hip_constants={"BLOCK_K": 64},
        hip_options={"num_stages": 2},
        multiples=("N", "K", "stride_x", "prefetch"),
        matrix=True,
    )


CASES = [
    case("gemm plain", OUT),
    case("gemm partials", PARTIAL, PARTS=4, PARTIALS=True),
    case("gemm uneven, bias", OUT | PARTIAL | {"bias": "*bf16"}, PARTS=2, EVEN_K=False),
    case("gemm residual and norm", OUT | PARTIAL | SUM, PARTS=4),
    case("gemm silu after norm", OUT | SQUARES, PAIRED=True),
    case("gemm argmax", SQUARES | BEST, BLOCK_M=64),
    case("gemm swapped", OUT, SWAP=True),
    replace(
        case("gemm overlapped", OUT, PDL=True, EARLY=False),
        targets=CUDA[1:],
        options={"num_warps": 4, "num_stages": 4, "launch_pdl": True},
    ),
    Case(
        "gemm best of tiles",
        gemm_kernels.best_kernel,
        {"best": "*fp32", "best_ids": "*i32", "out": "*i64", "tiles": "i32"},
        {"BLOCK": 1024, "PDL": False},
        wide=False,  # rows of any length
    ),
]
