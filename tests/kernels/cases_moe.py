"""Mixtures of experts, at the sizes of Qwen3-30B-A3B and DeepSeek's routing; decode and prefill."""

from __future__ import annotations

from typing import Any

from forerun.kernels.elementwise import quantize_fp8
from forerun.kernels.moe import align, experts, experts_fp8, experts_mxfp4, gated_output, router
from forerun.kernels.moe.config import (
    choose_moe,
    choose_moe_fp8,
    choose_router_tile,
    router_slice,
)
from forerun.kernels.runtime.gpu import GpuInfo, next_power_of_2
from tests.kernels.compiled import CUDA, SMEM_LIMIT, TARGETS, Case

B16, F32, I32 = "*bf16", "*fp32", "*i32"
HIDDEN, WIDTH, TOP_K = 2048, 768, 8
CDNA = GpuInfo(num_sms=304, amd=True, warp_size=64)
RDNA = GpuInfo(num_sms=96, amd=True, warp_size=32)


def nvidia(target: str) -> GpuInfo:
    return GpuInfo(132, amd=False, capability=int(target[3:]), smem_bytes=SMEM_LIMIT[target])


def logits(name: str, hidden: int, tokens: int) -> Case:
    tile = choose_router_tile(tokens, 128, nvidia("sm_90"))
    return Case(
        name,
        router._router_logits,
        {"x": B16, "w": B16, "partials": F32, **dict.fromkeys(("T", "E", "k_vectors"), "i32")},
        {
            "SLICE": router_slice(hidden), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k, "EVEN_K": hidden % tile.block_k == 0, "PREFETCH": True,
            "NUM_THREADS": 32 * tile.num_warps,
        },
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        multiples=("E", "k_vectors"),
        matrix=True,
        targets=TARGETS if tokens <= 1024 else CUDA,
    )  # fmt: skip


def top_k(name: str, num_experts: int = 128, **constants: Any) -> Case:
    groups = constants.get("NUM_GROUPS", 1)
    all_ = {
        "rounded_like": None, "correction_bias": None, "SLICES": 8, "NUM_EXPERTS": num_experts,
        "NUM_GROUPS": 1, "KEPT_GROUPS": 1, "GROUPS_BLOCK": next_power_of_2(groups),
        "GROUP_BLOCK": next_power_of_2(num_experts // groups),
        "EXPERTS_BLOCK": next_power_of_2(num_experts), "TOP_K": TOP_K, "NUM_SHARED": 0,
        "CHOICES_BLOCK": 8, "SIGMOID": False, "TOP2": False, "NORM": True, "ALIGN": True,
        "ONE_CTA": False, "BLOCK_M": 16, "TOKENS": router.TOKENS, **constants,
    }  # fmt: skip
    pointers = {
        "partials": F32, "correction_bias": F32, "rounded_like": B16, "weights_out": F32,
        "experts_out": I32, "counts": I32, "pairs": I32, "tiles": I32,
    }  # fmt: skip
    all_ |= {} if all_["ALIGN"] else {"pairs": None, "tiles": None}
    for present in [n for n, value in all_.items() if value is ...]:
        del all_[present]
    signature = {n: kind for n, kind in pointers.items() if n not in all_}
    signature |= {"T": "i32", "max_tiles": "i32", "factor": "fp32", "norm_eps": "fp32"}
    warps = max(router.WARPS, all_["TOKENS"]) if all_["ALIGN"] else router.WARPS
    return Case(name, router._top_k, signature, all_, options={"num_warps": warps}, wide=False)


def alignment(num_experts: int, block_m: int = 128) -> list[Case]:
    """The kernels that make the tiles of many tokens."""
    sizes = dict.fromkeys(("num_pairs", "num_experts"), "i32")
    count = {"experts": I32, "counts": I32, **sizes}
    total = {"counts": I32, "totals": I32, "chunks": "i32", "num_experts": "i32"}
    place = count | {"totals": I32, "pairs": I32, "tiles": I32, "max_tiles": "i32"}
    columns = next_power_of_2(num_experts)
    count_options, total_options, place_options = align.options_of_align(columns)
    place_options |= {"BLOCK_M": block_m}
    cases = []
    for name, kernel, signature, options in (
        ("count pairs", align._count_pairs, count, count_options),
        ("sum chunks", align._sum_chunks, total, total_options),
        ("place pairs", align._place_pairs, place, place_options),
    ):
        warps, name = {"num_warps": options.pop("num_warps")}, f"{name} of {num_experts} experts"
        cases.append(Case(name, kernel, signature, options, options=warps, wide=False))
    select = dict.fromkeys(("tiles", "selected"), I32)
    select |= dict.fromkeys(("max_tiles", "first_expert", "num_experts"), "i32")
    block, warps = {"BLOCK": align.SELECTED_BLOCK}, {"num_warps": align.SELECTED_WARPS}
    name = "tiles of a rank's experts"
    return [*cases, Case(name, align._select_tiles, select, block, options=warps, wide=False)]


def gemms(
    name: str,
    tokens: int,
    out: str,
    shared: bool = False,
    even: bool = True,
    biases: bool = False,
    gelu: bool = False,
) -> list[Case]:
    """Both grouped GEMMs with the tiles of so many tokens."""
    return [
        case
        for target in TARGETS
        for case in _gemms_on(target, name, tokens, out, shared, even, biases, gelu)
    ]


def _gemms_on(
    target: str,
    name: str,
    tokens: int,
    out: str,
    shared: bool,
    even: bool,
    biases: bool,
    gelu: bool = False,
) -> list[Case]:
    rocm = {"gfx942": CDNA, "gfx950": CDNA, "gfx1100": RDNA}
    tiles = choose_moe(tokens, rocm[target] if target in rocm else nvidia(target))
    strides = ("h_vectors", "i_vectors") if even else ()  # otherwise multiples of 8
    sizes = dict.fromkeys(("max_tiles", "h_vectors", "i_vectors"), "i32")
    pairs = {"pairs": I32, "tiles": I32}
    gate_up = {"x": B16, "w13": B16, "act": B16, **pairs, **sizes}
    down = {"act": B16, "w2": B16, "out": out, "weights": F32, **pairs, **sizes, "T": "i32"}
    down |= {"prefetch_k": "i32", **({"shared": B16} if shared else {})}
    absent = {} if shared else {"shared": None}
    of_gate_up: dict[str, Any] = {"ALPHA": 1.702, "LIMIT": 7.0, "GELU": gelu}
    if biases:
        gate_up, down = gate_up | {"b13": B16}, down | {"b2": B16}
    else:
        of_gate_up, absent = of_gate_up | {"b13": None}, absent | {"b2": None}
    if tiles.tma:
        block_m, gate_up_n, down_n = tiles.block_m, tiles.gate_up.block_n, tiles.down.block_n
        gate_up |= {"w13": f"tensordesc<bf16[{gate_up_n}, {tiles.gate_up.block_k}]>"}
        block_k = tiles.down.block_k
        down |= {"act": f"tensordesc<bf16[{block_m}, {block_k}]>"}
        down |= {"w2": f"tensordesc<bf16[{down_n}, {block_k}]>"}
    cases = []
    for kernel, label, signature, config, more in (
        (experts._gate_up, "gate/up", gate_up, tiles.gate_up, of_gate_up),
        (experts._down, "down", down, tiles.down, absent),
    ):
        constants = {"TOP_K": TOP_K, "EVEN_K": even, "BLOCK_M": tiles.block_m, **more}
        constants["TMA"] = tiles.tma
        if kernel is experts._down:
            constants["NUM_THREADS"] = 32 * config.num_warps
        cases.append(
            Case(
                f"{label}, {name}",
                kernel,
                signature,
                constants | {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k},
                options={"num_warps": config.num_warps, "num_stages": config.num_stages},
                targets=(target,),
                multiples=strides,
                matrix=True,
            )
        )
    return cases


GATE_UP_FP8, DOWN_FP8 = experts_fp8.gate_up_fp8, experts_fp8.down_fp8
SCALES = ("rows", "groups", "blocks")


def fp8(tokens: int, out: str, scales: str) -> list[Case]:
    """Both grouped GEMMs with weights in e4m3."""
    return [case for target in TARGETS for case in _fp8_on(target, tokens, out, scales)]


def _fp8_on(target: str, tokens: int, out: str, scales: str) -> list[Case]:
    amd = {"gfx942": CDNA, "gfx950": CDNA, "gfx1100": RDNA}.get(target)
    capability = int(target.removeprefix("sm_")) if amd is None else 0
    config = choose_moe_fp8(tokens, amd or nvidia(target), SCALES.index(scales))
    decode = 0 if config.quantize_x else 2 if amd is None else 1
    sizes = dict.fromkeys(("max_tiles", "h_groups", "i_groups"), "i32")
    x, w = (B16, "*u8") if decode else ("*fp8e4nv", "*fp8e4nv")
    common = {"values": w, "scales": F32, "pairs": I32, "tiles": I32, **sizes}
    of_x = {} if decode else {"x_scales": F32, "act_scales": F32}
    absent = {"x_scales": None, "act_scales": None} if decode else {}
    quantizes = not decode and scales != "rows" and config.tiles.gate_up.block_n == 128
    of_gate_up: dict[str, Any] = {"INTERLEAVED": target == "sm_90", "NATIVE": capability >= 90}
    of_gate_up |= {} if quantizes else {"act_scales": None}
    gate_up = {"x": x, "act": "*u8" if quantizes else B16, **common, **of_x}
    down = {"act": x, "out": out, "weights": F32, "T": "i32", "prefetch_k": "i32", **common, **of_x}
    cases = []
    for kernel, signature, tile, more in (
        (GATE_UP_FP8, gate_up, config.tiles.gate_up, of_gate_up),
        (DOWN_FP8, down, config.tiles.down, {"shared": None, "NUM_THREADS": 32}),
    ):
        constants = {
            "TOP_K": TOP_K, "SCALES": SCALES.index(scales), "DECODE": decode,
            "BLOCK_M": config.tiles.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        }  # fmt: skip
        if "NUM_THREADS" in more:
            more = {**more, "NUM_THREADS": 32 * tile.num_warps}
        names = kernel.fn.__code__.co_varnames
        cases.append(
            Case(
                f"{kernel.fn.__name__} of {tokens} tokens, scales of {scales}",
                kernel,
                {n: kind for n, kind in signature.items() if n in names and n not in more},
                {**constants, **{n: v for n, v in absent.items() if n in names}, **more},
                options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
                targets=(target,),
                matrix=True,
                wide=target != "gfx1100",
                # accumulators, and products beside them
                spill_bytes=256 if tokens > 1024 and scales == "blocks" else 0,
            )
        )
    return cases


def mxfp4(tokens: int, out: str) -> list[Case]:
    """Both grouped GEMMs of gpt-oss."""
    sizes = dict.fromkeys(("max_tiles", "h_blocks", "i_blocks"), "i32")
    matrices = {"values": "*u8", "scales": "*u8", "pairs": I32, "tiles": I32, **sizes}
    gate_up = {"x": B16, "b13": B16, "act": B16, **matrices}
    down = {"act": B16, "b2": B16, "out": out, "weights": F32, **matrices, "T": "i32"}
    of_gate_up = {"ALPHA": 1.702, "LIMIT": 7.0}
    rocm = {"gfx942": CDNA, "gfx950": CDNA, "gfx1100": RDNA}
    cases = []
    for target in TARGETS:
        gpu = rocm[target] if target in rocm else nvidia(target)
        tiles = choose_moe(tokens, gpu)
        for kernel, signature, config, more in (
            (experts_mxfp4.gate_up_mxfp4, gate_up, tiles.gate_up, of_gate_up),
            (experts_mxfp4.down_mxfp4, down, tiles.down, {}),
        ):
            sizes_ = {"TOP_K": 4, "BLOCK_M": tiles.block_m, "BLOCK_N": config.block_n}
            cases.append(
                Case(
                    f"{kernel.fn.__name__} of {tokens} tokens",
                    kernel,
                    signature,
                    {**sizes_, **more},
                    options={"num_warps": config.num_warps, "num_stages": config.num_stages},
                    targets=(target,),
                    matrix=True,
                    wide=tokens > 1,
                    spill_bytes=0 if tokens == 1 else 512,  # 128 x 128 accumulators on sm_80
                )
            )
    return cases


CASES = [
    logits("router logits", HIDDEN, 16),
    logits("router logits of hundreds of tokens", HIDDEN, 512),
    logits("router logits of thousands of tokens", HIDDEN, 8192),
    logits("router logits of 7168", 7168, 16),
    top_k("top-k, Qwen3", rounded_like=...),
    top_k("top-k in one CTA", rounded_like=..., ONE_CTA=True),
    top_k("top-k of 16 tokens in one CTA", rounded_like=..., ONE_CTA=True, TOKENS=16),
    top_k("top-k of many tokens", ALIGN=False, TOKENS=router.MANY_TOKENS),
    top_k("top-k, DeepSeek-V2", 160, NUM_GROUPS=8, KEPT_GROUPS=3, TOP_K=6, NORM=False),
    top_k("top-k, DeepSeek-V3", 256, NUM_GROUPS=8, KEPT_GROUPS=4, TOP2=True, SIGMOID=True,
          correction_bias=...),
    top_k("top-k of 16 tokens, DeepSeek-V3", 256, NUM_GROUPS=8, KEPT_GROUPS=4, TOP2=True,
          SIGMOID=True, correction_bias=..., ONE_CTA=True, TOKENS=16),
    top_k("top-k and shared experts, DeepSeek-V2-Lite", 64, TOP_K=6, NUM_SHARED=2, NORM=False),
    top_k("top-k and shared experts in one CTA", 64, TOP_K=6, NUM_SHARED=2, NORM=False,
          ONE_CTA=True),
    top_k("top-k, Kimi-K2", 384, SIGMOID=True, correction_bias=...),
    *alignment(1),
    *alignment(64, block_m=64),
    *alignment(128),
    *alignment(160),
    *alignment(512),
    *gemms("1 token", 1, F32),
    *gemms("512 tokens and shared experts", 512, B16, shared=True),
    *gemms("8192 tokens", 8192, B16),
    *gemms("1 token, gpt-oss", 1, F32, biases=True),
    *gemms("8192 tokens, gpt-oss", 8192, B16, biases=True),
    *gemms("1 token, Gemma 4", 1, F32, gelu=True),
    *gemms("8192 tokens, Gemma 4", 8192, B16, gelu=True),
    *mxfp4(1, F32),
    *mxfp4(8192, B16),
    *fp8(1, F32, "rows"),
    *fp8(1, F32, "groups"),
    *fp8(1, F32, "blocks"),
    *fp8(1024, B16, "rows"),
    *fp8(8192, B16, "groups"),
    *fp8(8192, B16, "blocks"),
    *(
        Case(
            "groups of tokens in e4m3",
            quantize_fp8._quantize_groups,
            {"x_ptr": B16, "out_ptr": "*u8", "scales_ptr": F32, "n": "i32"},
            {"INTERLEAVED": True, "NATIVE": native, "BLOCK": quantize_fp8.ROWS_BLOCK},
            options={"num_warps": quantize_fp8.ROWS_WARPS},
            targets=("sm_90", "sm_100") if native else TARGETS,
            multiples=("n",),
        )
        for native in (False, True)
    ),
    *gemms("multiples of 8", 1, F32, even=False),
    Case(
        "gated output",
        gated_output._gate_output,
        {"x_ptr": B16, "weight_ptr": B16, "value_ptr": B16, "out_ptr": F32},
        {"HIDDEN": 2048, "BLOCK": 2048, "PDL": False},
        options={"num_warps": 8},
        hip_options={"num_warps": 4},
    ),
    Case(
        "combine",
        experts._combine,
        {"partials": B16, "out": B16, "T": "i32", "H": "i32"},
        {"TOP_K": TOP_K, "BLOCK": experts.COMBINE_BLOCK},
        options={"num_warps": 4},
        hip_options={"num_warps": 2},
        multiples=("H",),
    ),
]  # fmt: skip
