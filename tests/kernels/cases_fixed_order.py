"""Attention in a fixed order and sums of exponentials, as `test_compile.py` compiles them."""

from __future__ import annotations

from typing import Any

import torch

from forerun.kernels.attention.fixed_order import (
    SHARED_STAGES,
    _chunk_kernel,
    _fold_kernel,
    _step_kernel,
)
from forerun.kernels.attention.mla_fixed_order import _latent_kernel
from forerun.kernels.attention.tiles import (
    LatentShape,
    fixed_order_tile,
    lone_fixed_order_stages,
    mla_fixed_order_tile,
    prefill_tile_config,
)
from forerun.kernels.runtime.fp8 import FP8
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.kernels.sampling.log_sum_exp import PART, _sum_part, _sum_parts
from tests.kernels.cases_attention import NAMES, POOLS, _common, _tiles
from tests.kernels.compiled import Case, on_each

STRIDES = ("q_token_stride", "q_head_stride", "page_table_stride")
FEW = ("sm_90", "sm_80", "gfx942")


def attention(
    name: str,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    q_len: int = 0,
    page: int = 64,
    group: int = 4,
    whole: bool = True,
    targets: tuple[str, ...] = FEW,
    ragged: bool = False,
    lone: bool = False,
    kv: torch.dtype | None = None,
    **more: Any,
) -> list[Case]:
    """`q_len` 0: of prompt chunks. `ragged`: a verify pass of at most `q_len` tokens each.

    `lone`: a CTA has its SM to itself.
    """
    q, kv = f"*{NAMES[dtype]}", kv or dtype
    signature = dict.fromkeys(("q_ptr", "out_ptr"), q)
    signature |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{POOLS[kv]}")
    signature |= dict.fromkeys(("page_table", "start_ptr"), "*i32")
    signature |= {"qk_scale": "fp32", **dict.fromkeys(STRIDES, "i32")}
    own: dict[str, Any] = {"sinks_ptr": None}
    if q_len:
        signature |= {"stats_ptr": "*fp32", "num_segments": "i32"}
        signature |= {"paths_ptr": "*i32", "depth_ptr": "*i32"}
        signature |= {} if whole else {"out_ptr": "*fp32"}
        signature |= {"first_ptr": "*i32"} if ragged else {}
        own |= {} if ragged else {"first_ptr": None}
        own |= {"Q_LEN": q_len, "WHOLE": whole, "TREE": False, "PREFETCH_LEN": 128}
    else:
        signature |= {"tile_map": "*i32"}

    def make(name: str, targets: tuple[str, ...], gpu: GpuInfo) -> Case:
        tile, common = fixed_order_tile(gpu, dim, dtype), _common(dim, page, group, kv)
        blocks, options = _tiles(tile)
        stages = tile.num_stages if whole else min(tile.num_stages, SHARED_STAGES)
        if lone:
            stages = lone_fixed_order_stages(gpu, dim, dtype, FP8 if kv == torch.uint8 else kv)
        blocks["STAGES"] = stages
        if not q_len:
            blocks["TILE_TOKENS"] = tile.block_m // group
            blocks["MAP_TOKENS"] = prefill_tile_config(gpu, dim, dtype).block_m // group
        return Case(
            name,
            _step_kernel if q_len else _chunk_kernel,
            signature,
            {k: v for k, v in (common | own | blocks | more).items() if k != "MASK"},
            {k: v for k, v in options.items() if k != "maxnreg"} | {"num_stages": stages},
            targets=targets,
            multiples=("q_token_stride", "q_head_stride"),
            matrix=dtype != torch.float32,
            spill_bytes=112,  # two accumulators of a tile
            chained=dtype != torch.float32,
            alike=f"{dim} {dtype}",
        )

    return on_each(name, targets, make)


def latent(
    name: str,
    q_len: int = 0,
    whole: bool = True,
    targets: tuple[str, ...] = FEW,
    ragged: bool = False,
    **more: Any,
) -> list[Case]:
    """MLA with 16 heads; `q_len` and `ragged` as in `attention`."""
    signature = dict.fromkeys(("q_ptr", "pool"), "*bf16")
    signature |= {"out_ptr": "*bf16" if whole else "*fp32", "stats_ptr": "*fp32"}
    tables = ("page_table", "start_ptr", "tile_map", "paths_ptr", "depth_ptr")
    signature |= {**dict.fromkeys(tables, "*i32"), "qk_scale": "fp32"}
    signature |= dict.fromkeys((*STRIDES, "num_segments"), "i32")
    constants = {
        "HEADS": 16, "Q_LEN": q_len, "LATENT": 512, "ROPE": 64, "WHOLE": whole, "TREE": False,
        "PAGE_SIZE": 64, "WINDOW": -1, "FP8": 0, "INT64_OFFSETS": True, "BLOCK_L": 512,
        "BLOCK_R": 64,
    }  # fmt: skip
    signature |= {"first_ptr": "*i32"} if ragged else {}
    constants |= {} if ragged else {"first_ptr": None}

    def make(name: str, targets: tuple[str, ...], gpu: GpuInfo) -> Case:
        shape = LatentShape(512, 64, torch.bfloat16, torch.bfloat16, 64)
        tile = mla_fixed_order_tile(gpu, shape)
        blocks, options = _tiles(tile)
        return Case(
            name,
            _latent_kernel,
            signature,
            constants | blocks | {"STAGES": tile.num_stages} | more,
            options,
            targets=targets,
            multiples=("q_token_stride", "q_head_stride"),
            matrix=True,
            spill_bytes=160,  # two accumulators of a tile, and a mask
            alike="latent",
        )

    return on_each(name, targets, make)


def fold(name: str, ragged: bool = False, **more: Any) -> Case:
    signature = {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "out_ptr": "*bf16"}
    signature |= {"start_ptr": "*i32", "rows": "i32", "num_segments": "i32", "ctas": "i32"}
    signature |= {"first_ptr": "*i32", "places": "*i64"} if ragged else {}
    constants = {"NUM_HEADS": 32, "Q_LEN": 8, "WINDOW": -1}
    constants |= {} if ragged else {"first_ptr": None, "places": None}
    blocks = {"DIM": 128, "BLOCK_ROWS": 16, "BLOCK_D": 128, "AHEAD": 8}
    return Case(name, _fold_kernel, signature, constants | blocks | more)


def sums(name: str, kernel: Any, pointers: dict[str, str], **constants: int) -> Case:
    numbers = dict.fromkeys(("vocab", "row_stride", "num_parts"), "i32")
    wanted = kernel.fn.__code__.co_varnames
    numbers = {name: kind for name, kind in numbers.items() if name in wanted}
    return Case(
        name,
        kernel,
        pointers | numbers,
        constants,
        {"num_warps": 4 if "PART" in constants else 1},
        multiples=("row_stride",),
        wide=False,
    )


CASES = [
    *attention("step", q_len=1),
    *attention("verify 8, left to a second kernel", q_len=8, whole=False),
    *attention("verify 8, a CTA an SM", q_len=8, whole=False, lone=True),
    *attention(
        "step, FP8", q_len=1, kv=torch.uint8, whole=False, lone=True, FP8=2, targets=("sm_90",)
    ),
    *attention("ragged verify 16", q_len=16, ragged=True),
    *attention("ragged verify 16, left to a second kernel", q_len=16, whole=False, ragged=True),
    *attention("ragged tree", q_len=16, TREE=True, ragged=True, targets=("sm_90",)),
    *attention("window", q_len=8, WINDOW=512, targets=("sm_90",)),
    *attention("tree", q_len=64, TREE=True, targets=("sm_90",)),
    *attention("tree, window", q_len=64, TREE=True, WINDOW=512, whole=False, targets=("sm_90",)),
    *attention("step, pages of 16", q_len=1, page=16, targets=("sm_90",)),
    *attention("step, heads of 64", q_len=1, dim=64, targets=("sm_90",)),
    *attention("step, heads of 256", q_len=1, dim=256, targets=("sm_90",)),
    *attention(
        "verify 8, heads of 256", q_len=8, dim=256, whole=False, lone=True, targets=("sm_90",)
    ),
    *attention("chunks"),
    *attention("chunks, heads of 256", dim=256, targets=("sm_90",)),
    *latent("latent, step", q_len=1),
    *latent("latent, verify 8, left to a second kernel", q_len=8, whole=False),
    *latent("latent, ragged verify 16", q_len=16, ragged=True),
    *latent("latent, ragged tree", q_len=16, ragged=True, TREE=True, targets=("sm_90",)),
    *latent("latent, tree", q_len=64, targets=("sm_90",), TREE=True),
    *latent("latent, tree, window", q_len=64, targets=("sm_90",), TREE=True, WINDOW=512),
    *latent("latent, chunks"),
    fold("fold"),
    fold("fold, ragged", ragged=True),
    fold("fold, window", WINDOW=512),
    sums("sums of parts", _sum_part, {"logits": "*bf16", "parts": "*fp32"}, PART=PART),
    sums("sum over parts", _sum_parts, {"parts": "*fp32", "out": "*fp32"}, BLOCK=64),
]
