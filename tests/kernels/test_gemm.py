"""Fused GEMMs against float64: odd shapes in Triton's interpreter, real ones on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.gemm import gemm as g
from forerun.kernels.gemm.config import (
    GemmConfig,
    Sm90GemmConfig,
    TritonGemmConfig,
    m_bucket,
    num_tiles,
)
from forerun.kernels.gemm.dispatch import (
    LARGE_M,
    LARGE_M_SILU_MUL,
    TUNED,
    choose_gemm,
    choose_gemm_silu_mul,
    default_sm90_config,
    default_triton_config,
)
from forerun.kernels.gemm.gemm import DeferredNorm, GemmWeight
from forerun.kernels.gemm.gemm_sm90 import Sm90Variant, num_stages
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from forerun.layers.communication import WeightPlacement
from forerun.layers.gemm import SkinnyGemm
from forerun.layers.norm import RMSNorm, UnitOffsetRMSNorm

EPS = 1e-6
GPU = torch.cuda.is_available()
HOPPER = GPU and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


def close(got: Tensor, want: Tensor, limit: float) -> None:
    """‖got - want‖ / ‖want‖; NaN never passes."""
    error = float((got.double() - want).norm() / want.norm())
    assert error < limit, f"relative error {error}"


class Problem:
    """Random operands and their float64 results."""

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        self.x, self.residual, self.norm_weight = draw(m, k), draw(m, n), draw(n)
        self.w = GemmWeight.from_tensor(draw(n, k) * k**-0.5, draw(n))
        assert self.w.bias is not None
        weight, bias = self.w.weight.double(), self.w.bias.double()
        self.y_without_bias = self.x.double() @ weight.T
        self.y = self.y_without_bias + bias
        # As if x came from a GEMM with 5 tiles along N.
        self.deferred = DeferredNorm(self.x, torch.rand(5, m, device=device) * k, EPS)
        self.y_deferred = self.y_without_bias * self.deferred.inv_rms().double() + bias


def check_all_epilogues(p: Problem, config: GemmConfig, limit: float) -> None:
    close(g.gemm(p.x, p.w, config), p.y, limit)
    close(g.gemm(p.deferred, p.w, config), p.y_deferred, limit)
    total = p.y + p.residual.double()
    close(g.gemm_add(p.x, p.w, p.residual, config), total, limit)
    if isinstance(config, Sm90GemmConfig) or (
        config.num_ctas % num_tiles(*p.residual.shape, config) == 0
    ):
        close(g.gemm_partials(p.x, p.w, config).sum(0), p.y_without_bias, limit)

    deferred, out = g.gemm_add_deferred_norm(p.x, p.w, p.residual, p.norm_weight, EPS, config)
    close(out, total, limit)
    normed = F.rms_norm(total, total.shape[1:], p.norm_weight.double(), EPS)
    close(deferred.x * deferred.inv_rms(), normed, limit)

    gate, up = p.y.chunk(2, -1)
    close(g.gemm_silu_mul(p.x, p.w, config), F.silu(gate) * up, limit)

    ids = g.gemm_argmax(p.x, p.w, config)
    assert torch.equal(ids, g.gemm(p.x, p.w, config).argmax(-1))
    assert not p.w.semaphores.any()


# (M, N, K, configuration): tiles that do not divide N or K, split tiles, swapped operands.
SMALL = [
    (1, 64, 128, TritonGemmConfig(16, 32, num_ctas=4)),
    (3, 72, 136, TritonGemmConfig(32, 32, num_ctas=6)),
    (16, 48, 256, TritonGemmConfig(16, 64, num_ctas=12)),
    (17, 40, 96, TritonGemmConfig(32, 32, num_ctas=4, swap_ab=True)),
    (40, 56, 64, TritonGemmConfig(32, 64, num_ctas=1)),
    (5, 80, 224, TritonGemmConfig(16, 32, num_ctas=7)),
    (130, 48, 64, TritonGemmConfig(32, 32, num_ctas=8)),
]


@pytest.mark.covering(0, 2)
@pytest.mark.skipif(GPU, reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize(("m", "n", "k", "config"), SMALL)
def test_kernel_in_the_interpreter(m: int, n: int, k: int, config: TritonGemmConfig) -> None:
    torch.manual_seed(m)
    check_all_epilogues(Problem(m, n, k, torch.float32, torch.device("cpu")), config, 1e-6)


@pytest.mark.parametrize(("m", "n", "k", "config"), SMALL)
def test_reference_implementations(
    m: int, n: int, k: int, config: TritonGemmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch.manual_seed(m)
    check_all_epilogues(Problem(m, n, k, torch.float32, torch.device("cpu")), config, 1e-6)


@pytest.mark.skipif(GPU, reason="the interpreter runs where there is no GPU")
def test_a_strided_input() -> None:
    """x is a slice of a wider tensor, as the query heads are of the QKV projection."""
    problem = Problem(3, 32, 64, torch.float32, torch.device("cpu"))
    wide = torch.full((3, 100), float("nan"))
    wide[:, 5:69] = problem.x
    close(g.gemm(wide[:, 5:69], problem.w, TritonGemmConfig(16, 32)), problem.y, 1e-6)


def test_argmax_ties_take_the_lowest_id() -> None:
    weight = torch.zeros(80, 32)
    weight[[21, 37, 70]] = 1.0
    config = TritonGemmConfig(16, 32)
    ids = g.gemm_argmax(torch.ones(2, 32), GemmWeight.from_tensor(weight), config)
    assert ids.tolist() == [21, 21]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 21, 79])
def test_argmax_flags_invalid_logits(row: int, bad: float) -> None:
    """One invalid logit is enough, whichever tile it is in, and only in its own row."""
    weight = torch.arange(80.0).unsqueeze(1).expand(80, 32).contiguous()
    weight[row, 3] = bad
    x = torch.ones(3, 32)
    x[1] = 0.0
    x[1, :3] = 1.0
    want = [-1, -1 if bad != bad else 79, -1]
    if bad == float("inf"):  # inf * 0 is NaN
        want[1] = -1
    ids = g.gemm_argmax(x, GemmWeight.from_tensor(weight), TritonGemmConfig(16, 32))
    assert ids.tolist() == want


@pytest.mark.parametrize("m", [1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512])
def test_buckets(m: int) -> None:
    bucket = m_bucket(m)
    assert bucket in (16, 32, 64, 128, 256, 384, 512)
    assert m <= bucket
    assert bucket == 16 or m > bucket // 2


def test_default_configs_fit_into_shared_memory() -> None:
    """Even if the compiler pipelines all stages."""
    for gpu, limit in (
        (GpuInfo(108, amd=False, capability=80), 163 << 10),
        (GpuInfo(304, amd=True, warp_size=64), 64 << 10),
    ):
        for bucket in (16, 32):
            c = default_triton_config(gpu)
            assert (c.block_n + bucket) * c.block_k * 2 * c.num_stages <= limit
            assert c.num_ctas >= gpu.num_sms


def test_tuned_configs_can_be_launched() -> None:
    """They meet what the launches assert: semaphores, alignment, whole CTAs per tile, SMEM."""
    for shapes in TUNED.values():
        for (n, k), choices in shapes.items():
            semaphores = len(GemmWeight.from_tensor(torch.empty(n, k, device="meta")).semaphores)
            for bucket, c in choices.items():
                assert bucket == m_bucket(bucket)
                if isinstance(c, Sm90GemmConfig):
                    assert k % (64 * c.split_k) == 0 and c.block_n % (16 * c.cluster_m) == 0
                    assert num_stages(c, Sm90Variant(deferred_norm_in=True)) > 2
                elif c is not None:
                    count = num_tiles(bucket, n, c)
                    assert count <= semaphores
                    assert not c.keep_partials or c.num_ctas % count == 0
                    assert (c.block_n + bucket) * c.block_k * 2 * c.num_stages <= 227 << 10


def test_without_nvrtc_the_library_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuInfo(132, amd=False, capability=90)
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    assert isinstance(choose_gemm(24576, 4096, 128, gpu), Sm90GemmConfig)
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert choose_gemm(24576, 4096, 128, gpu) is None
    assert choose_gemm(24576, 4096, 32, gpu) is not None


def test_untuned_shapes_with_many_tokens_go_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    for gpu, max_m in (
        (GpuInfo(132, amd=False, capability=90), 128),
        (GpuInfo(108, amd=False, capability=80), 32),
        (GpuInfo(304, amd=True, warp_size=64), 32),
    ):
        assert choose_gemm(1000, 512, max_m, gpu) is not None
        assert choose_gemm(1000, 512, max_m + 1, gpu) is None
    hopper = GpuInfo(132, amd=False, capability=90)
    for n, k in ((1000, 520), (1004, 512)):  # not aligned for TMA and vector stores
        assert choose_gemm(n, k, 64, hopper) is None


def test_silu_mul_is_fused_for_large_m_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    hopper, other = GpuInfo(132, amd=False, capability=90), GpuInfo(148, amd=False, capability=100)
    for m in (16, 128, 512, LARGE_M - 1):
        assert choose_gemm_silu_mul(24576, 4096, m, hopper) == choose_gemm(24576, 4096, m, hopper)
    large = choose_gemm_silu_mul(24576, 4096, LARGE_M, hopper)
    assert isinstance(large, Sm90GemmConfig) and num_stages(large, Sm90Variant(silu_mul=True)) > 3
    assert choose_gemm_silu_mul(24576, 4096, LARGE_M, other) is None
    assert choose_gemm_silu_mul(24584, 4096, LARGE_M, hopper) is None


@pytest.mark.parametrize("bucket", [64, 128])
def test_sm90_default_equals_tuned_configs(bucket: int) -> None:
    gpu = GpuInfo(132, amd=False, capability=90)
    found = {
        shape: (default_sm90_config(*shape, bucket, gpu, partials=True), choices[bucket])
        for shape, choices in TUNED[90].items()
    }
    same = [shape for shape, (ours, tuned) in found.items() if ours == tuned]
    assert {(6144, 4096), (24576, 4096), (4096, 12288)} <= set(same)
    for config, _ in found.values():
        assert config is not None and config.block_n % (16 * config.cluster_m) == 0
        assert num_stages(config, Sm90Variant(deferred_norm_in=True, silu_mul=True)) > 2


@pytest.mark.parametrize(
    ("n", "k", "config"),
    [  # o_proj of qwen3-30b-a3b, of deepseek-v2-lite, and of qwen3-0.6b
        (2048, 4096, Sm90GemmConfig(64, consumer_warpgroups=1, split_k=4)),
        (2048, 2048, Sm90GemmConfig(64, consumer_warpgroups=1, split_k=4)),
        (1024, 2048, Sm90GemmConfig(32, consumer_warpgroups=1, split_k=4)),
    ],
)
def test_sm90_default_splits_k_where_n_is_small(n: int, k: int, config: Sm90GemmConfig) -> None:
    gpu = GpuInfo(132, amd=False, capability=90)
    for bucket in (16, 32):
        assert default_sm90_config(n, k, bucket, gpu, partials=True) == config
    for bucket in (16, 32, 64, 128):
        alone = default_sm90_config(n, k, bucket, gpu)
        assert alone is not None and alone.split_k == 1  # nothing adds the partials up
        many = default_sm90_config(n, k, 128, gpu, partials=True)
        assert many is not None and many.split_k <= 2
    wide = default_sm90_config(2560, 4096, 16, gpu, partials=True)  # 80 CTAs: most SMs are busy
    assert wide == Sm90GemmConfig(32, consumer_warpgroups=1)
    odd = default_sm90_config(896, 896, 16, gpu, partials=True)  # 14 blocks of K
    assert odd is not None and odd.split_k == 2


REAL = [(6144, 4096), (4096, 12288), (24576, 4096), (151936, 4096), (5000, 2056)]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), REAL)
@pytest.mark.parametrize("m", [1, 16, 33])
def test_all_epilogues_on_a_gpu(m: int, n: int, k: int) -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(m)
    config = choose_gemm(n, k, m, gpu_of(device)) or default_triton_config(gpu_of(device))
    problem = Problem(m, n, k, torch.bfloat16, device)
    check_all_epilogues(problem, config, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [TritonGemmConfig(64, 128, 133), TritonGemmConfig(64, 128, 133, swap_ab=True)]
)
def test_results_are_deterministic_and_batch_invariant(config: TritonGemmConfig) -> None:
    device = torch.device("cuda", 0)
    problem = Problem(16, 4096, 4096, torch.bfloat16, device)
    first = g.gemm(problem.x, problem.w, config)
    for _ in range(20):
        assert torch.equal(g.gemm(problem.x, problem.w, config), first)
    for m in (1, 5, 15):
        assert torch.equal(g.gemm(problem.x[:m], problem.w, config), first[:m])


# (M, N, K, configuration): several tiles per CTA, split K, N not a multiple of the tile, several
# tiles along M, with and without clusters.
SM90 = [
    (2, 4096, 1024, Sm90GemmConfig(64, consumer_warpgroups=1)),
    (16, 6144, 4096, Sm90GemmConfig(96, consumer_warpgroups=1, cluster_m=2)),
    (100, 24576, 4096, Sm90GemmConfig(192)),
    (128, 4096, 4096, Sm90GemmConfig(32)),
    (128, 4096, 12288, Sm90GemmConfig(128, consumer_warpgroups=1, cluster_m=2, split_k=2)),
    (77, 5008, 640, Sm90GemmConfig(192)),
    (33, 4096, 1024, Sm90GemmConfig(96, consumer_warpgroups=1, split_k=4)),
    (300, 1536, 1024, Sm90GemmConfig(64)),
    (512, 24576, 2048, Sm90GemmConfig(256, cluster_m=2)),
    (385, 5008, 1024, Sm90GemmConfig(160, consumer_warpgroups=1, cluster_m=2)),
    (500, 5008, 640, Sm90GemmConfig(96, consumer_warpgroups=1, cluster_m=2, group_m=3)),
    (200, 1536, 1024, Sm90GemmConfig(64, consumer_warpgroups=1, split_k=2, group_m=3)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize(("m", "n", "k", "config"), SM90)
def test_sm90_kernel(m: int, n: int, k: int, config: Sm90GemmConfig) -> None:
    torch.manual_seed(m)
    problem = Problem(m, n, k, torch.bfloat16, torch.device("cuda", 0))
    check_all_epilogues(problem, config, 5e-3)
    # Deterministic, and independent of the other tokens.
    got = g.gemm(problem.deferred, problem.w, config)
    for _ in range(10):
        assert torch.equal(g.gemm(problem.deferred, problem.w, config), got)
    wide = torch.zeros(m, k + 9, dtype=torch.bfloat16, device=problem.x.device)
    wide[:, 3 : k + 3] = problem.x  # not aligned for TMA
    assert torch.equal(
        g.gemm(wide[:, 3 : k + 3], problem.w, config), g.gemm(problem.x, problem.w, config)
    )
    fewer = m - 11 if m > 20 else m - 1
    few = DeferredNorm(
        problem.x[:fewer], problem.deferred.sum_of_squares[:, :fewer].contiguous(), EPS
    )
    assert torch.equal(g.gemm(few, problem.w, config), got[:fewer])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("config", [Sm90GemmConfig(192), TritonGemmConfig(64, 128, 79)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_argmax_flags_invalid_logits_on_a_gpu(config: GemmConfig, bad: float) -> None:
    """Only the token whose logits are invalid; and all tokens where W is."""
    torch.manual_seed(0)
    problem = Problem(16, 5008, 640, torch.bfloat16, torch.device("cuda", 0))
    want = g.gemm_argmax(problem.x, problem.w, config)
    assert bool((want >= 0).all())
    problem.x[5, 7] = bad
    want[5] = -1
    assert torch.equal(g.gemm_argmax(problem.x, problem.w, config), want)
    problem.x[:, 3] = 1.0  # a positive factor: a logit of -inf is valid
    problem.w.weight[4999, 3] = bad
    assert g.gemm_argmax(problem.x, problem.w, config).tolist() == [-1] * 16


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize(("m", "n", "k"), [(3000, 24576, 4096), (1024, 6160, 1024)])
def test_silu_mul_of_large_m(m: int, n: int, k: int) -> None:
    problem = Problem(m, n, k, torch.bfloat16, torch.device("cuda", 0))
    assert choose_gemm_silu_mul(24576, 4096, LARGE_M, gpu_of(problem.x.device)) == LARGE_M_SILU_MUL
    gate, up = problem.y.chunk(2, -1)
    close(g.gemm_silu_mul(problem.x, problem.w, LARGE_M_SILU_MUL), F.silu(gate) * up, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        TritonGemmConfig(32, 128, 132),
        pytest.param(
            Sm90GemmConfig(32, consumer_warpgroups=1),
            marks=pytest.mark.skipif(not HOPPER, reason="needs Hopper"),
        ),
    ],
)
def test_kernels_overlapped_by_pdl_wait_for_each_other(config: GemmConfig) -> None:
    """A captured chain of GEMMs, each reading the one before; every replay has a new input."""
    device = torch.device("cuda", 0)
    n = 2048
    weights = [
        GemmWeight.from_tensor(torch.randn(n, n, device=device, dtype=torch.bfloat16) * n**-0.5)
        for _ in range(12)
    ]
    x = torch.randn(4, n, device=device, dtype=torch.bfloat16)
    norm = torch.ones(n, device=device, dtype=torch.bfloat16)

    def run() -> Tensor:
        y: Tensor | DeferredNorm = x
        total = x
        for w in weights:
            y, total = g.gemm_add_deferred_norm(y, w, total, norm, EPS, config)
        return total

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        x.normal_()
        graph.replay()
        got = out.clone()
        y, total = x.double(), x.double()
        for w in weights:
            total = total + y @ w.weight.double().T
            y = F.rms_norm(total, (n,), None, EPS)
        close(got, total, 2e-2)


def check_norms_after_a_gemm(device: torch.device, m: int, hidden: int) -> None:
    """Plain norms are begun in the epilogue where it can be; Gemma's, of float32, are not."""
    generator = torch.Generator(device).manual_seed(m)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    x, residual = normal(m, hidden), normal(m, hidden)
    weight, wide = normal(hidden, hidden) / hidden**0.5, normal(2 * hidden, hidden)
    gemm, reader = SkinnyGemm(weight, None), SkinnyGemm(wide, None)
    place = WeightPlacement(torch.bfloat16, device)
    for kind in (RMSNorm, UnitOffsetRMSNorm):
        norm = kind(hidden, EPS, place)
        norm.weight.copy_(normal(hidden) * 0.1)
        norm.prepare()
        normed, total = gemm.add_rms_norm(x, residual.clone(), norm, reader)
        want = residual.double() + x.double() @ weight.double().T
        close(total, want, 4e-3)
        want = want / (want.square().mean(1, keepdim=True) + EPS).sqrt() * norm.weight.double()
        if isinstance(normed, DeferredNorm):
            assert kind is RMSNorm
            close(normed.x * normed.inv_rms(), want, 8e-3)
        else:
            close(normed, want, 8e-3)


def test_norms_after_a_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(g, "use_triton", lambda x: False)  # the interpreter has no bfloat16
    check_norms_after_a_gemm(torch.device("cpu"), 3, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 33, 64, 100, 128])
@pytest.mark.parametrize("hidden", [2048, 4096])
def test_norms_after_a_gemm_on_a_gpu(m: int, hidden: int) -> None:
    check_norms_after_a_gemm(torch.device("cuda"), m, hidden)
