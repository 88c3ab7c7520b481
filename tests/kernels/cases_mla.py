"""MLA kernels as `test_compile.py` compiles them, with the tiles they run with."""

from __future__ import annotations

import torch

from forerun.kernels.attention.mla_expanded import _expanded_attention_kernel, split_dim
from forerun.kernels.attention.mla_kernels import mla_attention_kernel
from forerun.kernels.attention.mla_write import _write_latent
from forerun.kernels.attention.tiles import (
    LatentShape,
    expanded_tile_config,
    mla_prefill_tile_config,
    mla_tile_config,
    mla_uses_tma,
    padded,
)
from forerun.kernels.elementwise.latent_norm_rope import _latent_norm_rope_write
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.kernels.speculation.tree import mask_words
from tests.kernels.cases_attention import NAMES, ONE, POOLS, _tiles
from tests.kernels.compiled import RDNA, TARGETS, Case, on_each

STRIDES = ("kv_stride", "q_token_stride", "q_head_stride", "out_token_stride", "out_head_stride")


def absorbed(
    name: str,
    q_len: int,
    heads: int = 16,
    dims: tuple[int, int] = (512, 64),
    dtype: torch.dtype = torch.bfloat16,
    kv: torch.dtype | None = None,
    page: int = 64,
    targets: tuple[str, ...] = TARGETS,
    ragged: bool = False,
    **more: int,
) -> list[Case]:
    """`q_len` 0: chunks of prompts. `ragged`: a verify pass of at most `q_len` tokens each."""
    kv = kv or dtype
    latent, rope = dims
    stored = torch.float8_e4m3fn if kv == torch.uint8 else kv
    shape = LatentShape(latent, rope, dtype, stored, page)
    q, pool, splits = f"*{NAMES[dtype]}", f"*{POOLS[kv]}", q_len > 0
    names = (
        "q_ptr pool out_ptr lse_ptr page_table start_ptr tile_map tree_ptr qk_scale"
        " q_token_stride q_head_stride page_table_stride"
    )
    kinds = [q, pool, "*fp32" if splits else q, "*fp32", *["*i32"] * 3, "*i64", "fp32"]
    plain = dict(zip(names.split(), [*kinds, "i32", "i32", "i32"], strict=True))
    plain |= {"first_ptr": "*i32"} if ragged else {}

    def make(name: str, targets: tuple[str, ...], gpu: GpuInfo) -> Case:
        rows = heads * q_len
        tiles = mla_tile_config(gpu, rows, shape) if q_len else mla_prefill_tile_config(gpu, shape)
        blocks, options = _tiles(tiles)
        signature, constants = (
            dict(plain),
            {
                "HEADS": heads,
                "Q_LEN": q_len,
                "LATENT": latent,
                "ROPE": rope,
                "PAGE_SIZE": page,
                "MASK": 0,
                "WINDOW": -1,
                "SPLIT_KV": splits,
                "FP8": int(kv == torch.uint8),
                "INT64_OFFSETS": True,
                "TMA": mla_uses_tma(gpu, shape, tiles.block_n),
                "PREFETCH_LEN": 128,
                "PART": 128 if latent % 128 == 0 else latent,
                "BLOCK_L": padded(latent),
                "BLOCK_R": padded(rope),
                "WORDS": mask_words(max(1, q_len)),
                **({} if ragged else {"first_ptr": None}),
                **blocks,
            },
        )
        for part, dim in (("latent", latent), ("rope", rope)):
            if constants["TMA"]:
                box = f"tensordesc<{POOLS[kv]}[1, {tiles.block_n}, {dim}]>"
                signature[f"{part}_descriptor"] = box
            else:
                constants[f"{part}_descriptor"] = None
        return Case(
            name,
            mla_attention_kernel,
            signature,
            constants | more,
            options,
            targets=targets,
            multiples=("q_token_stride", "q_head_stride"),
            matrix=dtype != torch.float32,
            spill_bytes=_spills(gpu, shape),
        )

    return on_each(name, targets, make)


def expanded(
    name: str,
    dims: tuple[int, int] = (192, 128),
    dtype: torch.dtype = torch.bfloat16,
    targets: tuple[str, ...] = TARGETS,
    window: int = -1,
) -> list[Case]:
    half = f"*{NAMES[dtype]}"
    names = "q_ptr k_ptr v_ptr out_ptr cu_kv_lens tile_map qk_scale"
    strides = tuple(f"{x}_{of}_stride" for x in "qkv" for of in ("token", "head"))
    kinds = [*[half] * 4, "*i32", "*i32", "fp32", *["i32"] * 6]

    def make(name: str, targets: tuple[str, ...], gpu: GpuInfo) -> Case:
        blocks, options = _tiles(expanded_tile_config(gpu, *dims, dtype))
        main, rest = split_dim(dims[0])
        return Case(
            name,
            _expanded_attention_kernel,
            dict(zip((*names.split(), *strides), kinds, strict=True)),
            {
                "DIM": dims[0],
                "V_DIM": dims[1],
                "WINDOW": window,
                "BLOCK_D": main,
                "BLOCK_R": rest,
                "BLOCK_V": padded(dims[1]),
                **blocks,
            },
            options,
            targets=targets,
            multiples=strides,
            matrix=dtype != torch.float32,
        )

    return on_each(name, targets, make)


def _spills(gpu: GpuInfo, shape: LatentShape) -> int:
    """RDNA's 256 registers do not hold 16 x 512.

    NVIDIA: with [64, 512] accumulators a few addresses, what is converted from float8, and on
    Blackwell what is rescaled between tensor memory and registers.
    """
    if shape.latent_dim <= 256 or gpu == RDNA or gpu.amd:
        return 1024 if gpu == RDNA and shape.latent_dim > 256 else 0
    return 256 if shape.kv_dtype.itemsize == 1 else 64


CASES = [
    *absorbed("decode", 1),
    *absorbed("verify 2", 2),
    *absorbed("verify 5", 5),
    *absorbed("verify 16, pages of 16", 16, page=16),
    *absorbed("ragged verify 16", 16, ragged=True),
    *absorbed("ragged tree", 16, ragged=True, MASK=2, targets=ONE),
    *absorbed("decode, 128 heads", 1, heads=128, targets=("sm_90",)),
    *absorbed("tree", 16, MASK=2, targets=ONE),
    *absorbed("tree of 65", 65, MASK=2, targets=ONE),
    *absorbed("block, window", 16, MASK=1, WINDOW=512, targets=ONE),
    *absorbed("decode, float16", 1, dtype=torch.float16, page=16, targets=ONE),
    *absorbed("decode, float8", 1, kv=torch.uint8, targets=("sm_80", "gfx942")),
    *absorbed("verify 16, float8", 16, kv=torch.uint8, targets=("sm_80", "gfx942")),
    *absorbed("decode, float8", 1, kv=torch.uint8, FP8=2, targets=("sm_90", "sm_100")),
    *absorbed("verify 16, float8", 16, kv=torch.uint8, FP8=2, targets=("sm_90", "sm_100")),
    *absorbed("decode, float32", 1, dtype=torch.float32, targets=ONE),
    *absorbed("verify, float32", 5, dtype=torch.float32, page=16, targets=ONE),
    *absorbed("decode, small rows", 1, dims=(48, 16), targets=ONE),
    *absorbed("prefill", 0),
    *absorbed("prefill, pages of 16", 0, page=16, targets=ONE),
    *expanded("expanded"),
    *expanded("expanded, window", window=512, targets=ONE),
    *expanded("expanded, 256 values", dims=(256, 256), targets=(*ONE, "sm_80")),
    *expanded("expanded, float32", dtype=torch.float32, targets=ONE),
    *(
        Case(
            f"write latent rows, {pool}",
            _write_latent,
            {"latent_ptr": "*bf16", "kv_slots": "*i64", "pool": f"*{pool}", "row_stride": "i32"},
            {"DIM": 576, "FP8": pool == "u8", "BLOCK": 1024},
            {"num_warps": 2},
            multiples=("row_stride",),
            targets=ONE,
        )
        for pool in ("bf16", "u8")
    ),
    *(
        Case(
            f"latent norm, RoPE and write, {heads} heads, {pool}",
            _latent_norm_rope_write,
            {
                **dict.fromkeys(("kv_ptr", "q_ptr", "weight_ptr", "table"), "*bf16"),
                **{"positions": "*i32", "kv_slots": "*i64", "pool": f"*{pool}", "out_ptr": "*bf16"},
                "eps": "fp32",
                **dict.fromkeys(STRIDES, "i32"),
            },
            {
                "HEADS": heads,
                "LATENT": 512,
                "ROPE": 64,
                "FP8": pool == "u8",
                "GROUP": 8,
                "BLOCK": 512,
                "HALF": 32,
                "PDL": False,
            },
            {"num_warps": 2},
            multiples=STRIDES,
            wide=False,
        )
        for heads, pool in ((16, "bf16"), (128, "bf16"), (16, "u8"))
    ),
]
