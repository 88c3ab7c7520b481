"""GEMM kernels in Triton, with every epilogue."""

from __future__ import annotations

from dataclasses import replace

import torch

from forerun.kernels.gemm import gemm_triton, head_gemm
from forerun.kernels.runtime.gpu import GpuInfo
from forerun_bench.kernels import gemm_chain
from tests.kernels.compiled import CUDA, HIP, PDL_TARGETS, SMEM_LIMIT, TARGETS, Case

OPERANDS = {"x": "*bf16", "w": "*bf16", "semaphores": "*i32"}
OPTIONAL = (
    "scales", "bias", "sum_of_squares", "residual", "norm_weight", "out", "norm_out",
    "sum_of_squares_out", "tile_max", "tile_argmax", "partials",
)  # fmt: skip
SCALARS = dict.fromkeys(
    ("M", "N", "K", "stride_x", "norm_tiles", "tiles_m", "total_iters", "prefetch_k"), "i32"
)
SCALARS["eps"] = "fp32"
OUT = {"out": "*bf16"}
PARTIALS = {"partials": "*fp32"}
NORM_IN = {"sum_of_squares": "*fp32"}
NORM_OUT = {
    "residual": "*bf16",
    "norm_weight": "*bf16",
    "norm_out": "*bf16",
    "sum_of_squares_out": "*fp32",
}
ARGMAX = {"tile_max": "*fp32", "tile_argmax": "*i32"}


def case(name: str, tensors: dict[str, str], **constants: int | bool) -> Case:
    defaults = {
        "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "MAX_SPLIT": 1, "EARLY_LAUNCH": True,
        "SWAP_AB": False, "SILU_MUL": False, "WRITE_PARTIALS": False, "EVEN_K": True,
        "NUM_THREADS": 128, "FP8": 0, "GROUP": 0,
    }  # fmt: skip
    absent = {name: None for name in OPTIONAL if name not in tensors}
    return Case(
        name,
        gemm_triton.gemm_kernel,
        OPERANDS | tensors | SCALARS,
        absent | defaults | constants,
        options={"num_warps": 4, "num_stages": 4},
        hip_constants={"BLOCK_K": 64},
        hip_options={"num_stages": 2},
        multiples=("N", "K", "stride_x", "prefetch_k"),
        matrix=True,
    )


def fp8(name: str, tensors: dict[str, str], **constants: int | bool) -> list[Case]:
    """With an e4m3 weight; it is decoded in different ways."""
    tensors = tensors | {"w": "*u8", "scales": "*fp32"}
    return [
        replace(case(name, tensors, FP8=mode, **constants), targets=targets)
        for mode, targets in ((1, HIP), (2, CUDA))
    ]


def heads(
    name: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    targets: tuple[str, ...] = TARGETS,
) -> list[Case]:
    """H, K, N: absorb (N contiguous) if K < N, else project_v (K contiguous)."""
    (_, k, n), weight = sizes, torch.empty(sizes, dtype=dtype, device="meta")
    unit, other = ("w_n_stride", "w_k_stride") if k < n else ("w_k_stride", "w_n_stride")
    strides = "x_token_stride x_head_stride w_head_stride out_token_stride out_head_stride"
    multiples = (*strides.split(), other)
    pointer = "*fp32" if dtype == torch.float32 else "*bf16"
    constants = {
        "K": k, "N": n, "BLOCK_M": head_gemm.BLOCK_M, "SPLIT_K": head_gemm.SPLIT_K,
        "BLOCK_K": head_gemm.slice_width(k), unit: 1,
    }  # fmt: skip

    def on(target: str) -> Case:
        amd = target.startswith("gfx")
        gpu = GpuInfo(304 if amd else 132, amd, smem_bytes=SMEM_LIMIT[target])
        block_n = head_gemm.choose_block_n(gpu, weight)
        return Case(
            name,
            head_gemm._head_gemm,
            dict.fromkeys(("x", "w", "out"), pointer) | dict.fromkeys(("T", *multiples), "i32"),
            constants | {"BLOCK_N": block_n},
            options={"num_warps": head_gemm.SPLIT_K, "num_stages": 1 if amd else 2},
            targets=(target,),
            multiples=multiples,
            matrix=dtype != torch.float32,
        )

    return [on(target) for target in targets]


CASES = [
    case("gemm", OUT),
    case("gemm, split-K partials", PARTIALS, MAX_SPLIT=4, WRITE_PARTIALS=True, SWAP_AB=True),
    case("gemm, uneven K, bias", OUT | PARTIALS | {"bias": "*bf16"}, MAX_SPLIT=2, EVEN_K=False),
    case("gemm, residual, deferred norm out", OUT | PARTIALS | NORM_OUT, MAX_SPLIT=4),
    case("gemm, deferred norm in, SiLU-mul", OUT | NORM_IN, SILU_MUL=True),
    case("gemm, deferred norm in, argmax", NORM_IN | ARGMAX, BLOCK_M=64),
    case("gemm, swapped operands", OUT, SWAP_AB=True),
    replace(case("gemm, late launch of dependents", OUT, EARLY_LAUNCH=False), targets=PDL_TARGETS),
    *fp8("gemm, e4m3", OUT),
    fp8("gemm, e4m3, swapped operands", OUT, SWAP_AB=True, BLOCK_M=32)[1],  # not on AMD
    *fp8("gemm, e4m3, groups, deferred norm in, SiLU-mul", OUT | NORM_IN, SILU_MUL=True, GROUP=128),
    *heads("16 heads, absorb", (16, 128, 512)),
    *heads("16 heads, project_v", (16, 512, 128)),
    *heads("32 heads, absorb", (32, 128, 512)),
    *heads("32 heads, project_v", (32, 512, 128)),
    *heads("heads in float32, absorb", (16, 128, 512), torch.float32, ("sm_90", "gfx942")),
    *heads("heads in float32, project_v", (16, 512, 128), torch.float32, ("sm_90", "gfx942")),
    Case(
        "reduce argmax of tiles",
        gemm_triton.reduce_argmax_kernel,
        {"tile_max": "*fp32", "tile_argmax": "*i32", "out": "*i64", "tiles": "i32"},
        {"INVALID": -1, "BLOCK": 1024},
        wide=False,  # rows of any length
    ),
    Case(
        "benchmark's stand-in for attention",
        gemm_chain._between_kernel,
        {"x": "*bf16", "out": "*bf16", "N_IN": "i32", "N_OUT": "i32"},
        {"BLOCK": 1024},
        multiples=("N_IN", "N_OUT"),
        wide=False,  # 4 elements per thread with 64 threads per warp
    ),
]
