"""CUDA C++ kernels compile with NVRTC, with or without a GPU, and without register spills."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from forerun.kernels.attention import decode_sm90, fixed_order_sm90, mla_sm90, prefill_sm90
from forerun.kernels.elementwise import add_rms_norm_sm90
from forerun.kernels.gemm.config import Sm90GemmConfig
from forerun.kernels.gemm.dispatch import LARGE_M_SILU_MUL, TUNED
from forerun.kernels.gemm.gemm_sm90 import (
    MAX_SMEM_BYTES,
    SOURCE,
    Sm90Variant,
    cuda_source,
    num_stages,
    smem_bytes,
)
from forerun.kernels.moe import (
    experts_mxfp4_sm90,
    experts_sm90,
    router_logits_sm90,
    router_sm90,
)
from forerun.kernels.moe.config import (
    SM90_DECODE,
    SM90_FEW_TOKENS,
    SM90_FP8_DECODE,
    SM90_FP8_ONE_TOKEN,
    SM90_MXFP4_DECODE,
    SM90_MXFP4_FEW_TOKENS,
    SM90_MXFP4_FEW_TOKENS_NARROW,
    Sm90MoeConfig,
    Sm90Mxfp4Config,
    Sm90RouterConfig,
    choose_router_sm90,
)
from forerun.kernels.moe.routing import Routing
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo

VARIANTS = [
    Sm90Variant(),
    Sm90Variant(silu_mul=True, deferred_norm_in=True, bias=True),
    Sm90Variant(partials=True),
    Sm90Variant(argmax=True, bias=True),
    Sm90Variant(argmax=True, deferred_norm_in=True),
    Sm90Variant(deferred_norm_in=True, residual=True, deferred_norm_out=True, bias=True),
]
TUNED_CONFIGS = {
    config
    for shapes in TUNED.values()
    for buckets in shapes.values()
    for config in buckets.values()
    if isinstance(config, Sm90GemmConfig)
}
SLICED_CONFIGS = {
    Sm90GemmConfig(160, cluster_m=2, group_m=8, k_slices=2),
    Sm90GemmConfig(128, k_slices=2),
    Sm90GemmConfig(64, consumer_warpgroups=1, k_slices=2),
}
CONFIGS = sorted(TUNED_CONFIGS | {LARGE_M_SILU_MUL} | SLICED_CONFIGS, key=str)

SYSTEM_SMEM = 1024  # of every CTA

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sm90_gemm_compiles(config: Sm90GemmConfig, variant: Sm90Variant) -> None:
    assert_compiles_well(cuda_source(config, variant))
    assert num_stages(config, variant) > 2 and smem_bytes(config, variant) <= MAX_SMEM_BYTES


def assert_compiles_well(source: str) -> str:
    """Without warnings, spills, and waits that the compiler puts between wgmma. Returns the log."""
    cubin, log = nvrtc.compile_source(source, nvrtc.SM90A, verbose=True)
    assert cubin.startswith(b"\x7fELF")
    assert "warning" not in log and "serialized" not in log and "injected" not in log, log
    usage = re.search(r"(\d+) bytes stack frame, (\d+) .*stores, (\d+) ", log)
    assert usage is not None and usage.groups() == ("0", "0", "0"), log
    return log


@pytest.mark.exhaustive
@pytest.mark.parametrize("cluster_size", [1, 2])
def test_sm90_mla_compiles(cluster_size: int) -> None:
    assert_compiles_well(mla_sm90.cuda_source(cluster_size))
    assert mla_sm90.SMEM_BYTES <= MAX_SMEM_BYTES


def test_sm90_decode_compiles() -> None:
    assert_compiles_well(decode_sm90.cuda_source())
    assert decode_sm90.EARLY_STAGES <= decode_sm90.STAGES
    assert decode_sm90.smem_bytes() <= MAX_SMEM_BYTES


@pytest.mark.parametrize("ctas", [1, fixed_order_sm90.MAX_CTAS])
def test_sm90_fixed_order_compiles(ctas: int) -> None:
    assert_compiles_well(fixed_order_sm90.cuda_source(ctas))
    assert fixed_order_sm90.EARLY_STAGES <= fixed_order_sm90.STAGES
    assert fixed_order_sm90.SMEM_BYTES <= MAX_SMEM_BYTES


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(128, torch.bfloat16), (64, torch.float16)], ids=str
)
def test_sm90_prefill_compiles(head_dim: int, dtype: torch.dtype, fixed_order: bool) -> None:
    assert_compiles_well(prefill_sm90.cuda_source(head_dim, dtype, fixed_order))
    assert prefill_sm90.smem_bytes(head_dim) <= MAX_SMEM_BYTES


QWEN3_30B = experts_sm90.ExpertShape(hidden=2048, width=768, top_k=8)


@pytest.mark.parametrize("config", [SM90_FEW_TOKENS, SM90_DECODE], ids=str)
def test_sm90_experts_compile_and_fit(config: Sm90MoeConfig) -> None:
    """All CTAs run at once, or they would wait for each other: `ctas_per_sm` fit on one."""
    log = assert_compiles_well(experts_sm90.cuda_source(config, QWEN3_30B))
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None
    per_thread = -(-int(registers[1]) // 8) * 8
    assert config.ctas_per_sm * experts_sm90.THREADS * per_thread <= 64 << 10
    assert config.ctas_per_sm * (experts_sm90.smem_bytes(config) + 1024) <= 228 << 10


@pytest.mark.covering(1)
@pytest.mark.parametrize("fp8", [1, 2], ids=["rows", "groups"])
@pytest.mark.parametrize("config", [SM90_FP8_ONE_TOKEN, SM90_FP8_DECODE], ids=str)
def test_sm90_experts_in_fp8_compile_and_fit(config: Sm90MoeConfig, fp8: int) -> None:
    log = assert_compiles_well(experts_sm90.cuda_source(config, QWEN3_30B, None, fp8))
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None
    per_thread = -(-int(registers[1]) // 8) * 8
    assert config.ctas_per_sm * experts_sm90.THREADS * per_thread <= 64 << 10
    assert config.ctas_per_sm * (experts_sm90.smem_bytes(config, fp8) + 1024) <= 228 << 10


GPT_OSS = experts_sm90.ExpertShape(hidden=2880, width=2880, top_k=4)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "config", [SM90_MXFP4_FEW_TOKENS, SM90_MXFP4_FEW_TOKENS_NARROW, SM90_MXFP4_DECODE], ids=str
)
def test_sm90_experts_in_mxfp4_compile_and_fit(config: Sm90Mxfp4Config) -> None:
    log = assert_compiles_well(experts_mxfp4_sm90.cuda_source(config, GPT_OSS, 1.702, 7))
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None
    per_thread, threads = (
        -(-int(registers[1]) // 8) * 8,
        -(-experts_mxfp4_sm90.THREADS // 128) * 128,
    )
    assert threads * per_thread <= 64 << 10
    assert experts_mxfp4_sm90.smem_bytes(config) <= MAX_SMEM_BYTES


ROUTER = Sm90RouterConfig(slice=256, tiles_per_warp=2)
QWEN3_MOE = Routing(128, 8, norm_topk_prob=True, float32_logits=False)
ROUTERS = {  # also those with the most registers
    "qwen3-30b-a3b": (QWEN3_MOE, 2048),
    "qwen3-235b-a22b": (QWEN3_MOE, 4096),
    "deepseek-v2-lite": (Routing(64, 6, num_shared=2), 2048),
    "mixtral": (Routing(8, 2, norm_topk_prob=True), 4096),
    "gpt-oss": (Routing(128, 4, norm_topk_prob=True, float32_logits=False), 2880),
    "32 experts, H 6144": (Routing(32, 14, num_shared=2), 6144),
    "ragged slices": (Routing(120, 5, n_group=5, topk_group=2), 2888),
    "many experts": (Routing(336, 16, "sigmoid", True, correction_bias=True), 1024),
    "groups, bias": (
        Routing(
            256, 8, "sigmoid", True, 2.5, n_group=8, topk_group=4, group_score="top2",
            correction_bias=True, num_shared=1,
        ),
        2048,
    ),
}  # fmt: skip


def router_source(name: str, logit_bias: bool = False) -> str:
    routing, hidden = ROUTERS[name]
    hopper = GpuInfo(132, amd=False, capability=90)
    sizes = (routing.num_experts, routing.top_k, routing.groups[0])
    config = choose_router_sm90(1, hidden, *sizes, torch.bfloat16, hopper)
    assert config is not None
    return router_sm90.cuda_source(config, routing, hidden, routing.correction_bias, logit_bias)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("name", ROUTERS)
def test_sm90_router_compiles(name: str) -> None:
    assert_compiles_well(router_source(name))


@pytest.mark.exhaustive
def test_sm90_router_with_biased_logits_compiles() -> None:
    assert_compiles_well(router_source("gpt-oss", logit_bias=True))


@pytest.mark.parametrize("norm_parts", [0, 4])
def test_sm90_router_logits_compile(norm_parts: int) -> None:
    source = router_logits_sm90.cuda_source(ROUTER, QWEN3_MOE, 2048, norm_parts)
    log = assert_compiles_well(source)
    if norm_parts:
        smem = re.search(r"(\d+) bytes smem", log)
        assert smem is not None
        assert int(smem[1]) + SYSTEM_SMEM <= router_logits_sm90.NORM_SMEM_BYTES


@pytest.mark.parametrize("block_n", [32, 64, 96])
def test_sm90_gemm_leaves_shared_memory_free(block_n: int) -> None:
    config = Sm90GemmConfig(block_n, consumer_warpgroups=1, split_k=4)
    limited, variant = replace(config, free_smem=10 << 10), Sm90Variant(partials=True)
    assert smem_bytes(limited, variant) + (10 << 10) <= MAX_SMEM_BYTES
    assert num_stages(config, variant) - 1 <= num_stages(limited, variant) >= 10


@pytest.mark.parametrize(("hidden", "parts"), [(2048, 8), (4096, 2)])
def test_sm90_add_rms_norm_compiles(hidden: int, parts: int) -> None:
    assert_compiles_well(add_rms_norm_sm90.cuda_source(hidden, parts))


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("config", "fp8"),
    [
        (SM90_FEW_TOKENS, 0),
        *product((SM90_FP8_ONE_TOKEN, SM90_FP8_DECODE), (1, 2)),
    ],
    ids=str,
)
def test_sm90_experts_that_choose_compile(config: Sm90MoeConfig, fp8: int) -> None:
    log = assert_compiles_well(experts_sm90.cuda_source(config, QWEN3_30B, (QWEN3_MOE, False), fp8))
    smem = re.search(r"(\d+) bytes smem", log)
    assert smem is not None
    per_cta = int(smem[1]) + experts_sm90.smem_bytes(config, fp8) + 1024
    assert config.ctas_per_sm * per_cta <= MAX_SMEM_BYTES + 1024


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("source", "built"),
    [
        (SOURCE, cuda_source(CONFIGS[0], Sm90Variant())),
        (prefill_sm90.SOURCE, prefill_sm90.cuda_source(128, torch.bfloat16, True)),
        (decode_sm90.SOURCE, decode_sm90.cuda_source()),
        (fixed_order_sm90.SOURCE, fixed_order_sm90.cuda_source(2)),
        (mla_sm90.SOURCE, mla_sm90.cuda_source(2)),
        (experts_sm90.SOURCE, experts_sm90.cuda_source(SM90_FEW_TOKENS, QWEN3_30B)),
        (
            experts_mxfp4_sm90.SOURCE,
            experts_mxfp4_sm90.cuda_source(SM90_MXFP4_DECODE, GPT_OSS, 1.702, 7),
        ),
        (router_sm90.SOURCE, router_sm90.cuda_source(ROUTER, QWEN3_MOE, 2048, bias=False)),
        (
            router_logits_sm90.SOURCE,
            router_logits_sm90.cuda_source(ROUTER, QWEN3_MOE, 2048, norm_parts=4),
        ),
        (add_rms_norm_sm90.SOURCE, add_rms_norm_sm90.cuda_source(2048, 8)),
    ],
    ids=[
        "gemm",
        "prefill",
        "decode",
        "fixed order",
        "mla",
        "experts",
        "experts in mxfp4",
        "router",
        "router logits",
        "norm",
    ],
)
def test_sources_have_defaults_for_an_ide(source: Path, built: str) -> None:
    """The file compiles by itself, and its defaults name every macro that a build defines."""
    text = source.read_text()
    _, log = nvrtc.compile_source(text, nvrtc.SM90A, verbose=True)
    assert "warning" not in log, log
    built = built.removesuffix(text)
    defaults = re.search(r"#ifndef .*?#endif", text, re.DOTALL)
    assert defaults is not None
    names = [re.findall(r"^#define (\w+)", part, re.MULTILINE) for part in (built, defaults[0])]
    assert sorted(names[0]) == sorted(names[1])


def test_the_cache_key_depends_on_source_and_architecture() -> None:
    keys = {nvrtc._cache_key(source, arch) for source in "ab" for arch in ("sm_90a", "sm_100a")}
    assert len(keys) == 4


def test_compile_errors_name_the_line() -> None:
    with pytest.raises(nvrtc.CudaError, match=r"kernel\.cu\(2\).*nonsense"):
        nvrtc.compile_source("__global__ void f() {\n nonsense; }", nvrtc.SM90A)


def test_packed_arguments() -> None:
    tensor = torch.zeros(3)
    _buffer, address = nvrtc._pack_arguments((tensor, None, -7, 1.5))
    pointers = (ctypes.c_uint64 * 4).from_address(address)
    assert ctypes.c_uint64.from_address(pointers[0]).value == tensor.data_ptr()
    assert ctypes.c_uint64.from_address(pointers[1]).value == 0
    assert ctypes.c_int.from_address(pointers[2]).value == -7
    assert ctypes.c_float.from_address(pointers[3]).value == 1.5
