"""GEMMs of e4m3 weights against float64 of the dequantized weight: Triton's interpreter, Hopper."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.elementwise.quantize_fp8 import (
    deinterleave,
    dequantize_weight,
    dequantize_weight_ref,
    interleave,
    quantize_tokens,
    quantize_tokens_ref,
)
from forerun.kernels.gemm import gemm as g
from forerun.kernels.gemm.config import GemmConfig, Sm90Fp8GemmConfig, TritonGemmConfig
from forerun.kernels.gemm.dispatch import choose_fp8_gemm, choose_fp8_sm90
from forerun.kernels.gemm.gemm import GemmWeight
from forerun.kernels.gemm.gemm_fp8_sm90 import (
    Fp8Variant,
    cuda_source,
    num_stages,
    smem_bytes,
)
from forerun.kernels.gemm.gemm_sm90 import MAX_SMEM_BYTES, Sm90Variant
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.layers.gemm_quantized import Fp8Gemm
from tests.kernels.test_cuda import assert_compiles_well
from tests.kernels.test_gemm import EPS, GPU, HOPPER, Problem, check_all_epilogues, close

H200 = GpuInfo(132, amd=False, capability=90)
CPU = torch.device("cpu")
QWEN3_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]


class Fp8Problem(Problem):
    """A weight whose values use all of e4m3's range, scales that differ."""

    def __init__(
        self, shape: tuple[int, int, int], group: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        m, n, k = shape
        super().__init__(m, n, k, dtype, device)
        fp8 = Fp8Weight.empty(n, k, device, group or None)
        exponents = torch.randint(-9, 8, (n, k), device=device)
        fp8.values.copy_((torch.randn(n, k, device=device) * 2.0**exponents).clamp(-448, 448))
        fp8.scales.copy_((0.5 + torch.rand(fp8.scales.shape, device=device)) / (20 * k**0.5))
        self.use(fp8, self.w.bias)

    def use(self, fp8: Fp8Weight, bias: Tensor | None) -> None:
        assert bias is not None
        self.fp8, self.w = fp8, GemmWeight.from_fp8(fp8, bias)
        self.y_without_bias = self.x.double() @ fp8.dequantize().double().T
        self.y = self.y_without_bias + bias.double()
        self.y_deferred = self.y_without_bias * self.deferred.inv_rms().double() + bias.double()

    def pack(self) -> None:
        """For the kernel on Hopper."""
        values = interleave(self.fp8.values)
        self.w = GemmWeight.from_fp8(replace(self.fp8, values=values), self.w.bias)


# (M, N, K), columns that share a scale (0: all), configuration.
SMALL: list[tuple[tuple[int, int, int], int, TritonGemmConfig]] = [
    ((3, 72, 136), 0, TritonGemmConfig(32, 32, num_ctas=6)),
    ((17, 40, 128), 64, TritonGemmConfig(32, 32, num_ctas=4, swap_ab=True)),
    ((5, 48, 80), 32, TritonGemmConfig(16, 32, num_ctas=3)),
]


@pytest.mark.covering(0, 2)
@pytest.mark.skipif(GPU, reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize(("shape", "group", "config"), SMALL)
def test_triton_in_the_interpreter(
    shape: tuple[int, int, int], group: int, config: TritonGemmConfig
) -> None:
    torch.manual_seed(0)
    check_all_epilogues(Fp8Problem(shape, group, torch.float32, CPU), config, 1e-6)


def test_columns_are_reordered_within_128() -> None:
    columns = (torch.arange(384) % 251).to(torch.uint8).unsqueeze(0)
    order = torch.arange(384).unsqueeze(0)
    found = interleave(columns)
    assert torch.equal(deinterleave(found), columns)
    assert torch.equal(found[0, 128:256].sort().values, columns[0, 128:256].sort().values)
    # Thread 1 of step 2 in the second half of the first 128.
    at = 32 * 1 + 16 * 1 + 4 * 2
    want = [64 + 16 * 2 + c for c in (2, 10, 3, 11)]
    assert found[0, at : at + 4].tolist() == columns[0, order[0, want]].tolist()


@pytest.mark.parametrize("group", [0, 128])
def test_sums_do_not_depend_on_the_number_of_tokens(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    for (n, k), partials in product([*QWEN3_8B, (1024, 3072), (152064, 8192)], (False, True)):
        configs = [choose_fp8_gemm(n, k, m, H200, group, partials) for m in (1, 17, 64, 128)]
        order = {(c.k_groups, c.split_k) for c in configs if isinstance(c, Sm90Fp8GemmConfig)}
        assert None not in configs and len(order) == 1
        assert k % (128 * order.pop()[1]) == 0
    assert choose_fp8_gemm(4096, 4096, 129, H200, group) is None
    assert isinstance(choose_fp8_gemm(4096, 4100, 16, H200), TritonGemmConfig)


def variants() -> list[tuple[Sm90Fp8GemmConfig, Fp8Variant]]:
    """What dispatch launches for Qwen3-8B's shapes."""
    epilogues = {
        (6144, 4096): Sm90Variant(deferred_norm_in=True, bias=True),
        (4096, 12288): Sm90Variant(partials=True),
        (24576, 4096): Sm90Variant(deferred_norm_in=True, silu_mul=True),
        (4096, 4096): Sm90Variant(residual=True, deferred_norm_out=True),
    }
    return [
        (
            choose_fp8_sm90(n, k, m, H200, group, partials=epilogue.partials),
            Fp8Variant(m, epilogue, grouped=group > 0),
        )
        for ((n, k), epilogue), m, group in product(epilogues.items(), (8, 16, 64, 128), (0, 128))
    ]


@pytest.mark.exhaustive
@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
@pytest.mark.parametrize(("config", "variant"), variants(), ids=str)
def test_sm90_compiles(config: Sm90Fp8GemmConfig, variant: Fp8Variant) -> None:
    assert_compiles_well(cuda_source(config, variant))
    stages = num_stages(config, variant)
    assert stages > 2 and stages % config.k_groups == 0
    assert smem_bytes(config, variant) <= MAX_SMEM_BYTES


@pytest.mark.parametrize(
    ("k", "interleaved"), [(1500, False), (1536, True), (2500, False), (2560, True)]
)
def test_tokens_are_quantized_by_their_largest_value(k: int, interleaved: bool) -> None:
    x = torch.randn(4, k, device="cuda" if GPU else "cpu")
    x[2] = 0
    (values, scales), want = quantize_tokens(x, interleaved), quantize_tokens_ref(x, interleaved)
    assert torch.equal(scales, want[1]) and torch.equal(values.float(), want[0].float())
    values = deinterleave(values) if interleaved else values
    error = (values.float() * scales - x).abs()
    assert (error <= x.abs() / 16 + scales / 512).all()
    x[1, 1400], x[3, 3] = float("nan"), float("inf")
    bad = quantize_tokens(x)[1].isfinite().squeeze(1)
    assert bad.tolist() == [True, False, True, False]


@pytest.mark.parametrize("group", [0, 100])
def test_weights_are_dequantized_where_columns_belong(group: int) -> None:
    device = torch.device("cuda", 0) if GPU else CPU
    fp8 = Fp8Weight.empty(7, 1280, device, group or None)
    fp8.quantize_(torch.randn(7, 1280, device=device))
    stored = replace(fp8, values=interleave(fp8.values))
    for weight, interleaved in ((fp8, False), (stored, True)):
        for dequantize in (dequantize_weight, dequantize_weight_ref):
            got = dequantize(weight, torch.float32, interleaved)
            assert torch.equal(got, fp8.dequantize())


def check_layer(problem: Fp8Problem, limit: float) -> None:
    """Up to 128 tokens only the weight is rounded; of more tokens x is too, if scales are rows'."""
    layer, bias = Fp8Gemm(problem.fp8, problem.w.bias), problem.w.bias
    assert bias is not None
    for m in (3, len(problem.x)):
        x = problem.x[:m].double()
        if m > 128 and problem.fp8.scales.shape[1] == 1:
            values, scales = quantize_tokens_ref(problem.x[:m])
            x = values.double() * scales.double()
        want = x @ problem.fp8.dequantize().double().T + bias.double()
        close(layer(problem.x[:m]), want, limit)
        gate, up = want.chunk(2, 1)
        close(layer.silu_and_mul(problem.x[:m]), F.silu(gate) * up, limit)
        assert torch.equal(layer.argmax(problem.x[:m]), layer(problem.x[:m]).argmax(1))


@pytest.mark.skipif(GPU, reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("group", [0, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_a_layer_with_few_and_with_many_tokens(group: int) -> None:
    check_layer(Fp8Problem((130, 32, 128), group, torch.float32, CPU), 1e-6)


def check_epilogues(p: Problem, config: GemmConfig, limit: float) -> None:
    """All but argmax, which LM heads have: they are not quantized."""
    close(g.gemm(p.x, p.w, config), p.y, limit)
    close(g.gemm(p.deferred, p.w, config), p.y_deferred, limit)
    close(g.gemm_partials(p.x, p.w, config).sum(0), p.y_without_bias, limit)
    total = p.y + p.residual.double()
    deferred, out = g.gemm_add_deferred_norm(p.x, p.w, p.residual, p.norm_weight, EPS, config)
    close(out, total, limit)
    normed = F.rms_norm(total, total.shape[1:], p.norm_weight.double(), EPS)
    close(deferred.x * deferred.inv_rms(), normed, limit)
    gate, up = p.y.chunk(2, -1)
    close(g.gemm_silu_mul(p.x, p.w, config), F.silu(gate) * up, limit)


SM90 = [
    ((1, 4096, 1024), 0, Sm90Fp8GemmConfig(1, k_groups=2)),
    ((16, 6144, 4096), 0, Sm90Fp8GemmConfig(3)),
    ((33, 4096, 12288), 0, Sm90Fp8GemmConfig(2, split_k=4)),
    ((128, 24576, 4096), 0, Sm90Fp8GemmConfig(3)),
    ((100, 5008, 640), 128, Sm90Fp8GemmConfig(2)),
    ((32, 4096, 4096), 128, Sm90Fp8GemmConfig(1, k_groups=2)),
    ((128, 1000, 1024), 128, Sm90Fp8GemmConfig(1, k_groups=2, split_k=2)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize(("shape", "group", "config"), SM90)
def test_sm90_kernel(shape: tuple[int, int, int], group: int, config: Sm90Fp8GemmConfig) -> None:
    """Right, deterministic, and the same whatever the number of tokens and a token's place."""
    torch.manual_seed(0)
    problem = Fp8Problem(shape, group, torch.bfloat16, torch.device("cuda", 0))
    problem.pack()
    check_epilogues(problem, config, 5e-3)
    x, want = problem.x, g.gemm(problem.x, problem.w, config)
    for _ in range(10):
        assert torch.equal(g.gemm(x, problem.w, config), want)
    for m in {1, 5, 8, 9, 16, 17, 33, 65} & set(range(shape[0])):
        assert torch.equal(g.gemm(x[:m], problem.w, config), want[:m])
        assert torch.equal(g.gemm(x[-m:], problem.w, config), want[-m:])


@pytest.mark.gpu
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("swap_ab", [False, True])
def test_triton_on_a_gpu(group: int, swap_ab: bool) -> None:
    config = TritonGemmConfig(64, 128, 132, swap_ab=swap_ab)
    device = torch.device("cuda", 0)
    check_all_epilogues(Fp8Problem((33, 4096, 1152), group, torch.bfloat16, device), config, 5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("group", [0, 128])
def test_a_layer_on_a_gpu(group: int) -> None:
    device = torch.device("cuda", 0)
    check_layer(Fp8Problem((300, 4096, 2048), group, torch.bfloat16, device), 5e-3)
