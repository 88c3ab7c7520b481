"""Attention kernels as `test_compile.py` compiles them, with the tiles they run with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from forerun.kernels.attention.decode_kernels import combine_splits, decode_attention_kernel
from forerun.kernels.attention.paged_kv import _compute_kv_slots, _write_kv
from forerun.kernels.attention.prefill import _prefill_attention_kernel
from forerun.kernels.attention.tiles import (
    TileConfig,
    decode_tile_config,
    prefill_tile_config,
    uses_tma,
)
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.kernels.speculation.tree import mask_words
from tests.kernels.compiled import RDNA, TARGETS, Case, on_each

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POOLS = {torch.uint8: "u8", **NAMES}


ONE = ("sm_90", "gfx942")
SOME = ("sm_80", "sm_90", "sm_100", "gfx942")


def _tiles(tiles: TileConfig) -> tuple[dict[str, int], dict[str, int]]:
    blocks = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    return blocks, {
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **tiles.launch_options(),
    }


def _common(dim: int, page: int, group: int, kv: torch.dtype) -> dict[str, Any]:
    power = 1 << (dim - 1).bit_length()
    return {
        "GROUP": group,
        "KV_HEADS": 8,
        "DIM": dim,
        "PAGE_SIZE": page,
        "MASK": 0,
        "WINDOW": -1,
        "FP8": int(kv == torch.uint8),
        "INT64_OFFSETS": True,
        "SOFTCAP": 0.0,
        "BLOCK_D": power,
    }


def decode(
    name: str,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    kv: torch.dtype | None = None,
    q_len: int = 1,
    page: int = 16,
    group: int = 4,
    splits: bool = True,
    targets: tuple[str, ...] = TARGETS,
    sinks: bool = False,
    ragged: bool = False,
    **more: float,
) -> list[Case]:
    kv = kv or dtype
    q, pool = f"*{NAMES[dtype]}", f"*{POOLS[kv]}"
    names = (
        "q_ptr k_ptr v_ptr out_ptr lse_ptr page_table start_ptr tree_ptr qk_scale"
        " q_token_stride q_head_stride page_table_stride"
    )
    kinds = [q, pool, pool, "*fp32" if splits else q, "*fp32", "*i32", "*i32", "*i64", "fp32"]
    plain = dict(zip(names.split(), [*kinds, "i32", "i32", "i32"], strict=True))
    plain |= {"sinks_ptr": "*fp32"} if sinks else {}
    plain |= {"first_ptr": "*i32"} if ragged else {}
    own = {
        **_common(dim, page, group, kv),
        "Q_LEN": q_len,
        "SPLIT_KV": splits,
        **({} if sinks else {"sinks_ptr": None}),
        **({} if ragged else {"first_ptr": None}),
        "WORDS": mask_words(q_len),
        **more,
    }

    def make(name: str, targets: tuple[str, ...], gpu: GpuInfo) -> Case:
        tiles = decode_tile_config(gpu, group * q_len, dim, dtype, kv, page, one_cta_per_sm=splits)
        blocks: dict[str, Any]
        blocks, options = _tiles(tiles)
        blocks |= {"PREFETCH_LEN": 128, "STAGES": tiles.num_stages, "TMA": False}
        signature = dict(plain)
        if uses_tma(gpu, page, tiles.block_n, dim, kv):
            box = f"tensordesc<{POOLS[kv]}[1, {tiles.block_n}, {dim}]>"
            signature |= {"k_descriptor": box, "v_descriptor": box}
            blocks["TMA"] = True
        else:
            blocks |= {"k_descriptor": None, "v_descriptor": None}
        return Case(
            name,
            decode_attention_kernel,
            signature,
            own | blocks,
            options,
            targets=targets,
            multiples=("q_token_stride", "q_head_stride"),
            matrix=dtype != torch.float32,
            # 16 x 256 is too much for RDNA, and 64 x 512 a little too much for Blackwell.
            spill_bytes=2 * dim if dim > 128 and gpu == RDNA else 64 if dim > 256 else 0,
        )

    return on_each(name, targets, make)


def prefill(
    name: str,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    page: int = 16,
    group: int = 4,
    targets: tuple[str, ...] = TARGETS,
    sinks: bool = False,
    **more: float,
) -> list[Case]:
    q = f"*{NAMES[dtype]}"
    names = (
        "q_ptr k_ptr v_ptr out_ptr page_table start_ptr tile_map qk_scale"
        " q_token_stride q_head_stride page_table_stride"
    )
    kinds = [q, q, q, q, "*i32", "*i32", "*i32", "fp32", "i32", "i32", "i32"]
    signature = dict(zip(names.split(), kinds, strict=True))
    signature |= {"sinks_ptr": "*fp32"} if sinks else {}
    absent: dict[str, Any] = {} if sinks else {"sinks_ptr": None}

    def make(name: str, targets: tuple[str, ...], gpu: GpuInfo) -> Case:
        blocks, options = _tiles(prefill_tile_config(gpu, dim, dtype))
        tokens = {"TILE_TOKENS": blocks["BLOCK_M"] // group}
        return Case(
            name,
            _prefill_attention_kernel,
            signature,
            _common(dim, page, group, dtype) | tokens | blocks | absent | more,
            options,
            targets=targets,
            multiples=("q_token_stride", "q_head_stride"),
            matrix=dtype != torch.float32,
            # 16 x 256 is too much for RDNA; Hopper's two CTAs per SM are worth a few spills.
            spill_bytes=512 if dim > 128 and gpu == RDNA else 128 if "maxnreg" in options else 0,
        )

    return on_each(name, targets, make)


CASES = [
    *decode("decode"),
    *decode("verify 16", q_len=16, page=64),
    *decode("verify 16, pages of 16", q_len=16, targets=ONE),
    *decode("ragged verify 16", q_len=16, page=64, ragged=True),
    *decode("ragged verify 16, pages of 16", q_len=16, ragged=True, targets=ONE),
    *decode("ragged tree", q_len=16, page=64, ragged=True, MASK=2, targets=ONE),
    *decode("ragged, window", q_len=16, ragged=True, WINDOW=512, splits=False, targets=ONE),
    *decode("decode, pages of 64", page=64, targets=("sm_90", "sm_100")),
    *decode("tree, pages of 128", q_len=16, page=128, MASK=2, targets=("sm_90",)),
    *decode("window, pages of 64", q_len=16, page=64, WINDOW=512, targets=("sm_90",)),
    *decode("float32, pages of 64", dtype=torch.float32, dim=64, page=64, targets=("sm_90",)),
    *decode("draft block", q_len=16, MASK=1, WINDOW=512, targets=ONE),
    *decode("sliding draft block", q_len=16, page=64, MASK=3, WINDOW=512, targets=ONE),
    *decode("tree", q_len=16, MASK=2, targets=ONE),
    *decode("tree of 256", q_len=256, page=64, MASK=2, targets=ONE),
    *decode("tree, long window", q_len=16, page=64, MASK=2, WINDOW=4096, targets=ONE),
    *(  # sums of bits, a short window's, take registers
        replace(case, spill_bytes=16)
        for case in decode("tree, short window", q_len=16, MASK=2, WINDOW=8, targets=ONE)
    ),
    *decode("soft-cap, head dim 256", dim=256, group=2, SOFTCAP=50.0, targets=TARGETS),
    *decode("verify, soft-cap", dim=256, group=2, q_len=16, SOFTCAP=50.0, targets=ONE),
    *decode("decode, head dim 64", dim=64, group=2, targets=ONE),
    *decode("verify, head dim 256", dim=256, q_len=16, targets=(*ONE, "gfx1100")),
    *decode("decode, head dim 512", dim=512, group=8, page=32, targets=SOME),
    *decode("verify, head dim 512", dim=512, group=8, q_len=16, page=32),
    *decode("verify, head dim 512, float32", 512, torch.float32, q_len=16, targets=SOME),
    *decode(
        "verify, head dim 512, float8", dim=512, kv=torch.uint8, group=8, q_len=16, targets=ONE
    ),
    *decode("decode, float8", kv=torch.uint8, targets=("sm_80", "gfx942")),
    *decode("decode, float8", kv=torch.uint8, FP8=2, targets=("sm_90", "sm_100")),
    *decode("decode, float32", dtype=torch.float32, dim=64, group=2, targets=ONE),
    *decode("decode, sinks", dim=64, group=8, sinks=True, splits=False, targets=SOME),
    *decode(
        "verify, sinks, window",
        dim=64,
        group=8,
        q_len=8,
        page=64,
        WINDOW=128,
        sinks=True,
        targets=("sm_90", "sm_100"),
    ),
    *prefill("prefill"),
    *prefill("prefill, sinks", dim=64, group=8, sinks=True, targets=SOME),
    *prefill("prefill, window", page=64, WINDOW=512, targets=ONE),
    *prefill("prefill, sliding block", page=64, MASK=3, WINDOW=512, targets=ONE),
    *prefill("prefill, soft-cap", dim=256, group=2, page=64, SOFTCAP=50.0, targets=SOME),
    *prefill("prefill, head dim 64", dim=64, group=2, targets=ONE),
    *prefill("prefill, head dim 256", dim=256, targets=(*ONE, "gfx1100")),
    *prefill("prefill, head dim 512", dim=512, group=8, page=32),
    *prefill("prefill, head dim 512, float32", dim=512, dtype=torch.float32, targets=SOME),
    *prefill("prefill, float32", dtype=torch.float32, dim=64, group=2, targets=ONE),
    *(
        Case(
            f"combine splits{name}",
            combine_splits,
            {
                "partial_ptr": "*fp32",
                "lse_ptr": "*fp32",
                "out_ptr": "*bf16",
                "rows": "i32",
                "num_splits": "i32",
                **sinks,
            },
            {"NUM_HEADS": 64, "DIM": 128, "BLOCK_ROWS": rows, "BLOCK_SPLITS": splits}
            | {"BLOCK_D": 128, **({} if sinks else {"sinks_ptr": None})},
            {"num_warps": warps},
            targets=targets,
        )
        for name, sinks, rows, splits, warps, targets in (
            ("", {}, 2, 16, 4, ONE),
            (", sinks", {"sinks_ptr": "*fp32"}, 2, 16, 4, ONE),
            (", one warp", {}, 1, 32, 1, ("sm_80", "sm_90", "sm_100")),
        )
    ),
    Case(
        "KV slots",
        _compute_kv_slots,
        {
            "page_table": "*i32",
            "start_ptr": "*i32",
            "cu_q_lens": "*i32",
            "kv_slots": "*i64",
            "page_table_stride": "i32",
            "max_q_len": "i32",
        },
        {"PAGE_SIZE": 16, "RAGGED": True, "BLOCK": 64},
        wide=False,
        targets=ONE,
    ),
    *(
        Case(
            f"write, {pool}",
            _write_kv,
            {
                "k_ptr": "*bf16",
                "v_ptr": "*bf16",
                "kv_slots": "*i64",
                "k_pool": f"*{pool}",
                "v_pool": f"*{pool}",
                "k_stride": "i32",
                "v_stride": "i32",
            },
            {"SIZE": 1024, "FP8": pool == "u8", "CHUNK": 1024},
            {"num_warps": 2},
            multiples=("k_stride", "v_stride"),
            targets=TARGETS if pool == "u8" else ONE,
        )
        for pool in ("bf16", "u8")
    ),
]
