"""GEMMs with weights of 4-bit integers: layout, kernels, formats."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.gemm import gemm_int4_sm90
from forerun.kernels.gemm.gemm_int4 import (
    dequantize_int4,
    gemm_int4,
    gemm_int4_partials,
    gemm_int4_ref,
)
from forerun.kernels.gemm.gemm_int4_sm90 import (
    CONFIGS,
    PARTIALS_CONFIGS,
    Int4GemmConfig,
    Int4Variant,
)
from forerun.kernels.gemm.int4 import (
    Int4Weight,
    PackedInt4,
    dequantize_int4_ref,
    pack_int4,
    unpack_int4,
)
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.layers.gemm_quantized import Int4Gemm


def random_int4(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [N, K], float16 scales and zero points from 0 to 16, [N, K / 128]."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    scale = (torch.rand(n, k // 128, generator=g) * 0.02 + 0.001).half()
    return q, scale, torch.randint(0, 17, (n, k // 128), generator=g)


def plain(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """(q - zero) * scale, column by column."""
    group = torch.arange(q.shape[1]) // 128
    return (q.float() - zero[:, group].float()) * scale.float()[:, group]


def test_packing_keeps_every_value() -> None:
    q, scale, zero = random_int4(48, 384)
    packed = pack_int4(q, scale, zero)
    for got, want in zip(unpack_int4(packed), (q, scale, zero), strict=True):
        assert torch.equal(got, want.to(got.dtype))
    assert torch.equal(dequantize_int4_ref(packed), plain(q, scale, zero))


def test_words_are_operands_of_mma() -> None:
    """mma m16n8k16: register i of lane l has row l / 4 + 8 (i % 2), columns 2 (l % 4) + 8 (i / 2)
    and the next."""
    q, scale, zero = random_int4(32, 256)
    packed = pack_int4(q, scale, zero)
    words = packed[..., :1024].contiguous().view(torch.int32).view(2, 2, 2, 32, 4)
    for block, group, chunk, lane, word in [(0, 0, 0, 0, 0), (1, 0, 1, 30, 3), (1, 1, 0, 5, 2)]:
        value = int(words[block, group, chunk, lane, word])
        for i in range(4):
            for odd in range(2):
                row = 16 * block + lane // 4 + 8 * (i % 2)
                column = 128 * group + 64 * chunk + 16 * word + 2 * (lane % 4) + 8 * (i // 2) + odd
                assert value >> (4 * i + 16 * odd) & 15 == int(q[row, column])


@pytest.mark.parametrize("m", [1, 20])
@pytest.mark.parametrize("silu", [False, True])
def test_triton(m: int, silu: bool) -> None:
    q, scale, zero = random_int4(96, 256)
    bias = torch.randn(96).half()
    weight = PackedInt4(pack_int4(q, scale, zero), bias)
    x = torch.randn(m, 256).half()
    y = F.linear(x.float(), plain(q, scale, zero), bias.float())
    if silu:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    torch.testing.assert_close(gemm_int4_ref(x, weight, silu), y, atol=1e-4, rtol=1e-4)
    out = gemm_int4(x, weight, silu)
    torch.testing.assert_close(out.float(), y, atol=2e-3, rtol=2e-3)
    one = gemm_int4(x[:1], weight, silu)
    assert torch.equal(one, out[:1])


def test_a_layer_says_what_computes() -> None:
    weight = Int4Weight.of(*random_int4(32, 128))
    assert "up to 128 tokens W4A16 in" in Int4Gemm(weight, None).describe_quantized()


def test_dequantize_triton() -> None:
    q, scale, zero = random_int4(48, 640)
    packed = pack_int4(q, scale, zero)
    assert torch.equal(dequantize_int4(packed, torch.float32), plain(q, scale, zero))


SHAPES = {  # rows of W and K
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (24576, 4096, True),
    "down": (4096, 12288, False),
    "ragged tiles": (1040, 640, False),
    "one group": (64, 128, True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_hopper(name: str, device: torch.device) -> None:
    """Every number of tokens has the result that the token has alone."""
    n, k, silu = SHAPES[name]
    q, scale, zero = random_int4(n, k)
    bias = torch.randn(n).bfloat16().to(device)
    weight = PackedInt4(pack_int4(q.to(device), scale.to(device), zero.to(device)), bias)
    x = torch.randn(200, k, device=device).bfloat16()
    torch.testing.assert_close(
        dequantize_int4(weight.packed, torch.bfloat16),
        dequantize_int4_ref(weight.packed).bfloat16(),
    )
    whole = gemm_int4(x[:128], weight, silu)
    # Its error is that of x Wᵀ with W rounded to bfloat16, at most.
    plain = F.linear(x[:128], dequantize_int4(weight.packed, torch.bfloat16), bias)
    if silu:
        plain = F.silu(plain.float()[:, : n // 2]) * plain.float()[:, n // 2 :]
    exact = gemm_int4_ref(x[:128], weight, silu)
    assert (whole - exact).norm() <= 1.02 * (plain - exact).norm()
    for m in (1, 2, 8, 9, 16, 31, 64, 127, 128, 200):
        out, want = gemm_int4(x[:m], weight, silu), gemm_int4_ref(x[:m], weight, silu)
        assert (out - want).norm() < 5e-3 * want.norm()
        if m <= 128:
            assert torch.equal(out, whole[:m])
    if (n, k) == (4096, 12288):  # K is divided; without the bias
        plain_weight = PackedInt4(weight.packed)
        partials = gemm_int4_partials(x[:128], plain_weight)
        assert partials is not None and len(partials) > 1
        torch.testing.assert_close(
            partials.sum(0), gemm_int4_ref(x[:128], plain_weight), rtol=1e-4, atol=1e-2
        )
        for m in (1, 9, 31, 64):
            fewer = gemm_int4_partials(x[:m], plain_weight)
            assert fewer is not None and torch.equal(fewer, partials[:, :m])
    wide = torch.zeros(5, k + 9, dtype=torch.bfloat16, device=device)
    wide[:, :k] = x[:5]  # rows that TMA cannot read
    assert torch.equal(gemm_int4(wide[:, :k], weight, silu), whole[:5])


@pytest.mark.gpu
def test_captured(device: torch.device) -> None:
    """In a chain of GEMMs with programmatic dependent launch, one after the other."""
    q, scale, zero = random_int4(1024, 1024)
    weight = PackedInt4(pack_int4(q.to(device), scale.to(device) / 16, zero.to(device)))
    x = torch.randn(3, 1024, device=device).bfloat16()

    def chain() -> Tensor:
        y = x
        for _ in range(6):
            y = gemm_int4(y, weight)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for seed in range(5):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, chain())


@pytest.mark.covering(0, 2)
@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
@pytest.mark.parametrize(
    ("config", "variant"),
    [
        (CONFIGS[0], Int4Variant(8, bias=True)),
        (CONFIGS[4], Int4Variant(128, silu_mul=True)),
        (CONFIGS[2], Int4Variant(64)),
        (PARTIALS_CONFIGS[0], Int4Variant(16, partials=True)),
        (PARTIALS_CONFIGS[0], Int4Variant(128, partials=True)),
    ],
    ids=str,
)
def test_hopper_kernel_compiles(config: Int4GemmConfig, variant: Int4Variant) -> None:
    """With the registers that its footprint asks for."""
    source = gemm_int4_sm90.cuda_source(config, variant)
    log = nvrtc.compile_source(source, nvrtc.SM90A, verbose=True)[1]
    registers = variant.footprint.registers
    assert not registers or f"Used {registers} registers" in log
    assert "warning" not in log
    spills = re.search(r"(\d+) bytes spill stores", log)
    assert spills is not None and int(spills[1]) <= 64


def test_every_configuration_fits() -> None:
    for chosen, tokens, partials in product(
        CONFIGS + PARTIALS_CONFIGS, (8, 16, 32, 64, 128), (False, True)
    ):
        if tokens <= chosen.max_tokens:
            config = gemm_int4_sm90.tile_config(chosen, tokens)
            variant = Int4Variant(tokens, partials=partials)
            smem = gemm_int4_sm90.smem_bytes(config, variant)
            assert gemm_int4_sm90.num_stages(config, variant) >= 2
            assert smem <= gemm_int4_sm90.MAX_SMEM_BYTES
            assert tokens * (config.rows + 4) * 4 <= smem - 2048  # the sums
    hopper = GpuInfo(132, amd=False, capability=90)
    if nvrtc.available():
        for k in (128, 640, 4096, 11008, 12288):
            for n in (32, 4096, 24576):
                assert gemm_int4_sm90.choose_config(n, k, True, hopper, torch.bfloat16) is not None
