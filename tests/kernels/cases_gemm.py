"""The few-row products, every form of them."""

from __future__ import annotations

from dataclasses import replace

from forerun.kernels import gemm_hopper, gemm_kernels
from tests.kernels.compiled import CUDA, Case

TENSORS = {"x": "*bf16", "w": "*bf16", "locks": "*i32"}
ABSENT = dict.fromkeys(
    ("bias", "squares", "residual", "norm_weight", "out", "scaled", "out_squares", "best",
     "best_ids", "partial", "x_blocks", "w_blocks")
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


def blocks(name: str, tensors: dict[str, str], **constants: int | bool) -> Case:
    """By descriptors: bulk copies. Where there are none, configurations have no descriptors."""
    shape = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64} | constants
    width = shape["BLOCK_N"] // 2 if constants.get("PAIRED") else shape["BLOCK_N"]
    given = {
        "x_blocks": f"tensordesc<bf16[{shape['BLOCK_M']},64]>",
        "w_blocks": f"tensordesc<bf16[{width},64]>",
    }
    return replace(case(name, tensors | given, **shape), targets=CUDA[1:])


def hopper(name: str, *, block_n: int, stages: int, tensors: dict[str, str]) -> Case:
    """The same in Gluon, which is for Hopper alone; tensors "paired" and "partials" are flags."""
    first = 1 << (block_n.bit_length() - 1)
    rest = block_n - first
    paired = "paired" in tensors

    def block(*shape: int) -> str:
        layout = (
            "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, "
            f"rank={len(shape)}, transposed=False, fp4_padded=False, cga_layout=[])"
        )
        return f"tensordesc<bf16{list(shape)},{layout}>"

    def weight(rows: int) -> str:
        return block(rows // 16, 2, 8, 64) if paired else block(rows, 64)

    given = {"x_blocks": block(128, 64), "w_blocks": weight(first)}
    given |= {"w_rest": weight(rest)} if rest else {}
    given |= {key: kind for key, kind in tensors.items() if kind}
    absent = {key: None for key in ("w_rest", "best_ids") if key not in given}
    return Case(
        name,
        gemm_hopper.hopper_kernel,
        given | dict.fromkeys(("M", "N", "tiles", "tiles_m", "split", "chunks"), "i32"),
        absent
        | {
            "BLOCK_M": 128, "FIRST": first, "REST": rest, "BLOCK_K": 64, "STAGES": stages,
            "PAIRED": paired, "PARTIALS": "partials" in tensors, "PDL": True,
            "MULTIPLIER": gemm_hopper.MULTIPLIER, "LOADER": gemm_hopper.LOADER,
        },
        options={"num_warps": 4, "maxnreg": gemm_hopper.REGISTERS, "launch_pdl": True},
        targets=("sm_90",),
        multiples=("N",),
        matrix=True,
    )  # fmt: skip


CASES = [
    case("gemm plain", OUT),
    case("gemm partials", PARTIAL, PARTS=4, PARTIALS=True),
    case("gemm uneven, bias", OUT | PARTIAL | {"bias": "*bf16"}, PARTS=2, EVEN_K=False),
    case("gemm residual and norm", OUT | PARTIAL | SUM, PARTS=4),
    case("gemm silu after norm", OUT | SQUARES, PAIRED=True),
    case("gemm argmax", SQUARES | BEST, BLOCK_M=64),
    case("gemm swapped", OUT, SWAP=True),
    blocks("gemm blocks", OUT),
    blocks("gemm blocks, partials", PARTIAL, PARTS=4, PARTIALS=True),
    blocks("gemm blocks, residual and norm", OUT | PARTIAL | SUM, PARTS=2),
    blocks("gemm blocks, silu", OUT | SQUARES, PAIRED=True),
    blocks("gemm blocks, argmax", BEST),
    replace(
        case("gemm overlapped", OUT, PDL=True, EARLY=False),
        targets=CUDA[1:],
        options={"num_warps": 4, "num_stages": 4, "launch_pdl": True},
    ),
    hopper("gemm hopper", block_n=192, stages=5, tensors=OUT),
    hopper("gemm hopper, silu", block_n=192, stages=5, tensors=OUT | {"paired": ""}),
    hopper(
        "gemm hopper, partials", block_n=128, stages=6, tensors={"out": "*fp32", "partials": ""}
    ),
    hopper(
        "gemm hopper, argmax", block_n=192, stages=5, tensors={"out": "*fp32", "best_ids": "*i32"}
    ),
    Case(
        "gemm best of tiles",
        gemm_kernels.best_kernel,
        {"best": "*fp32", "best_ids": "*i32", "out": "*i64", "M": "i32", "tiles": "i32"},
        {"BLOCK": 1024, "PDL": False},
        wide=False,  # a column of a matrix
    ),
]
