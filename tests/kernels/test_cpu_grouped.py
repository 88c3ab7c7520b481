"""GEMMs of codes of 4 and 8 bits: the bits of float32 over the dequantized weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.cpu import library
from forerun.kernels.cpu.gemm import Format
from forerun.kernels.gemm.grouped import GroupedKind, GroupedWeight
from tests.kernels.cpu_levels import at_levels
from tests.kernels.test_cpu_gemm import epilogues

pytestmark = [
    pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("level"),
    at_levels("native"),
]

KINDS = [
    GroupedKind(bits, group, zero, scales)
    for bits, zero in ((4, 0), (4, 8), (8, 0), (8, 32), (8, 128))
    for group in (16, 32)
    for scales in (torch.float16, torch.float32)
]
MULTIPLES = [
    GroupedKind(bits, group, zero, torch.int8, supers=256 // group)
    for bits, group, zero in ((4, 16, 0), (4, 16, 4), (4, 32, 0), (8, 32, 0), (8, 16, 32))
]
POINTS = [
    GroupedKind(4, group, zero, scales, points=zero == 0)
    for group in (32, 48, 96)
    for zero in (0, 8)
    for scales in (torch.float16, torch.bfloat16, torch.float32)
]
SHAPES = ((64, 64), (33, 32), (50, 96), (138, 160), (520, 64))
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 40, 230)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_weight(n: int, k: int, kind: GroupedKind) -> GroupedWeight:
    """Scales of all exponents that float16 has, subnormal ones too; of 17 bits in float32."""
    draw = torch.Generator().manual_seed(n * k)
    wide = kind.scales in (torch.float32, torch.int8)
    most = 1 << (min(kind.bits, 6) if wide else kind.bits)
    if kind.zero == 32:
        most = 64
    codes = torch.randint(0, most, (n, k), generator=draw).to(torch.uint8)
    shape = n, k // kind.group
    halves = [torch.randn(shape, generator=draw).half() for _ in range(2)]
    small = 2.0 ** torch.randint(-20, 4, shape, generator=draw)
    scales, leasts = ((each * small).half().float() for each in halves)
    if kind.scales is torch.bfloat16:
        scales = scales.bfloat16()
    elif kind.scales is torch.float32 and kind.group <= 32:
        scales, leasts = 63 * scales, 63 * leasts
    if kind.points:
        leasts = torch.randint(0, 17, shape, generator=draw).float()
    supers = None, None
    if kind.supers:
        shared = [each[:, :: kind.supers].half() for each in (scales, leasts)]
        supers = shared[0], None if kind.zero else shared[1]
        scales, leasts = (torch.randint(-32, 64, shape, generator=draw) for _ in range(2))
    return GroupedWeight.of(codes, (scales, None if kind.zero else leasts), kind, supers)


def magnitudes(weight: GroupedWeight) -> torch.Tensor:
    """[N, K] float64: |code * scale| + |least|, which are added up one by one."""
    kind, (scales, leasts) = weight.kind, weight.factors()
    first = weight.integers().unflatten(1, (-1, kind.group)) * scales.double().abs().unsqueeze(2)
    second = scales * kind.zero if leasts is None else leasts * scales if kind.points else leasts
    return (first + second.double().abs().unsqueeze(2)).flatten(1)


def operands(n: int, k: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens + n)
    return torch.randn(tokens, k, generator=draw), torch.randn(n, generator=draw)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gemm_has_the_bits_of_float32(n: int, k: int, kind: GroupedKind) -> None:
    weight, (x, bias) = random_weight(n, k, kind), operands(n, k, max(TOKENS))
    packed = cpu.pack_grouped(weight, bias, torch.float32)
    plain = cpu.pack(weight.dequantize(), bias, Format.FLOAT32)
    assert packed.nbytes <= -(-n // library.panel()) * library.panel() / n * weight.nbytes
    want = cpu.gemm(x, plain)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for tokens in TOKENS:
            assert torch.equal(cpu.gemm(x[:tokens], packed), want[:tokens]), tokens


@pytest.mark.parametrize("kind", KINDS + MULTIPLES + POINTS, ids=str)
@pytest.mark.parametrize("n", [33, 520])
def test_int8_tokens(n: int, kind: GroupedKind) -> None:
    """Tokens that are multiples of a scale, which rounding leaves alone; weights as they are."""
    k = kind.group * (kind.supers or 2) * (3 if kind.group == 16 and not kind.supers else 1)
    weight, (x, bias) = random_weight(n, k, kind), operands(n, k, max(TOKENS))
    x = (x * 40).round().clamp(-127, 127)
    x[:, :: cpu.GROUP] = 127
    x *= 2.0 ** -(torch.arange(k) // cpu.GROUP)
    packed = cpu.with_int8_tokens(cpu.pack_grouped(weight, bias, torch.float32))
    want = x.double() @ weight.dequantize().double().T + bias
    size = x.double().abs() @ magnitudes(weight).T + bias.abs()
    whole = cpu.gemm(x, packed)
    assert ((whole - want).abs() <= 1e-6 * size).all()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for count in TOKENS:
            assert torch.equal(cpu.gemm(x[:count], packed), whole[:count]), count
    assert torch.equal(cpu.gemm(x[7:8], packed), whole[7:8])
    ids = torch.tensor([n - 1, 0, 17])
    assert torch.equal(cpu.take_packed_rows(packed, ids), weight.dequantize()[ids])
    rounded = cpu.with_int8_tokens(cpu.pack_grouped(weight, bias, torch.bfloat16))
    assert torch.equal(cpu.gemm(x[:5].bfloat16(), rounded), cpu.gemm(x[:5], packed).bfloat16())


@pytest.mark.parametrize("kind", POINTS, ids=str)
@pytest.mark.parametrize("n", [33, 138])
def test_zero_points_of_groups(n: int, kind: GroupedKind) -> None:
    """Those of AWQ and GPTQ: groups of any number of columns, up to whole rows."""
    test_gemm_has_the_bits_of_float32(n, 96 * (2 if kind.group < 96 else 1), kind)
    test_rows_are_the_dequantized_ones(kind, torch.float32)


@pytest.mark.parametrize("kind", MULTIPLES, ids=str)
@pytest.mark.parametrize("n", [33, 138])
def test_scales_that_are_multiples(n: int, kind: GroupedKind) -> None:
    """Those of GGUF's kinds that end with K."""
    test_gemm_has_the_bits_of_float32(n, 512, kind)
    weight = random_weight(n, 256, kind)
    packed, ids = cpu.pack_grouped(weight, None, torch.float32), torch.arange(n).flip(0)
    assert torch.equal(cpu.take_packed_rows(packed, ids), weight.dequantize()[ids])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_epilogues_have_the_bits_of_float32(tokens: int, kind: GroupedKind) -> None:
    n, k = 138, 96
    weight, (x, bias) = random_weight(n, k, kind), operands(n, k, tokens)
    residual = torch.randn(tokens, n, generator=torch.Generator().manual_seed(1))
    packed = cpu.pack_grouped(weight, bias, torch.float32)
    plain = cpu.pack(weight.dequantize(), bias, Format.FLOAT32)
    torch.set_num_threads(2)
    for got, want in zip(
        epilogues(x, packed, residual), epilogues(x, plain, residual), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", KINDS[::5], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_bfloat16_tokens_are_rounded_once(tokens: int, kind: GroupedKind) -> None:
    n, k = 138, 96
    weight, (x, bias) = random_weight(n, k, kind), operands(n, k, tokens)
    x = x.bfloat16()
    wide = cpu.gemm(x.float(), cpu.pack_grouped(weight, bias, torch.float32))
    assert torch.equal(cpu.gemm(x, cpu.pack_grouped(weight, bias, torch.bfloat16)), wide.bfloat16())


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_dequantized_ones(kind: GroupedKind, dtype: torch.dtype) -> None:
    weight = random_weight(100, 96, kind)
    packed = cpu.pack_grouped(weight, None, dtype)
    assert cpu.has_rows(packed)
    ids = torch.tensor([99, 0, 31, 32, 33, 0, 17, 48])
    assert torch.equal(cpu.take_packed_rows(packed, ids), weight.dequantize()[ids].to(dtype))


@pytest.mark.parametrize("kind", KINDS + MULTIPLES, ids=str)
def test_parts_of_several_kinds_keep_their_values(kind: GroupedKind) -> None:
    for other in KINDS + MULTIPLES:
        both = GroupedKind.of_all([kind, other])
        weight = GroupedWeight.empty(60, 256, both, torch.device("cpu"))
        parts = random_weight(20, 256, kind), random_weight(40, 256, other)
        weight.map(lambda t: t[:20]).copy_(parts[0])
        weight.map(lambda t: t[20:]).copy_(parts[1])
        assert torch.equal(weight.dequantize(), torch.cat([p.dequantize() for p in parts]))
