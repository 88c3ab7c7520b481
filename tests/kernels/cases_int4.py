"""4-bit weights in Triton."""

from __future__ import annotations

from dataclasses import replace

from forerun.kernels.gemm import gemm_int4_triton
from tests.kernels.compiled import CUDA, TARGETS, Case

_OPERANDS = {"x": "*bf16", "packed": "*i32", "out": "*bf16"}
_SIZES = dict.fromkeys(("M", "N", "groups", "stride_x"), "i32")


def gemm(name: str, block_m: int, bias: bool = False) -> Case:
    tensors = _OPERANDS | ({"bias": "*bf16"} if bias else {})
    absent = {} if bias else {"bias": None}
    constants = {"BLOCK_M": block_m, "BLOCK_N": gemm_int4_triton.BLOCK_N}
    return Case(
        name,
        gemm_int4_triton.int4_gemm_kernel,
        tensors | _SIZES,
        absent | constants,
        options={"num_warps": gemm_int4_triton.num_warps(block_m), "num_stages": 2},
        hip_options={"num_stages": 1},
        multiples=("N", "stride_x"),
        matrix=True,
    )


RDNA = ("gfx1100",)
CDNA = tuple(target for target in TARGETS if target not in CUDA + RDNA)
FEW, MANY = gemm("int4 GEMM", 16), gemm("int4 GEMM, 128 tokens, bias", 128, bias=True)
CASES = [
    replace(FEW, targets=CUDA),
    replace(FEW, targets=CDNA, wide=False),  # 4 columns of x per thread with 64 threads per warp
    replace(FEW, targets=RDNA, spill_bytes=256),
    replace(MANY, targets=CUDA + CDNA),
    replace(MANY, targets=RDNA, spill_bytes=64),
    Case(
        "int4 dequantization",
        gemm_int4_triton.dequantize_int4_kernel,
        {"packed": "*i32", "out": "*bf16", "groups": "i32"},
        {"CHUNKS": gemm_int4_triton.DEQUANTIZE_CHUNKS},
        options={"num_warps": 4},
        wide=False,  # words are gathered
    ),
]
