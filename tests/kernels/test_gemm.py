"""Few-row products against float64: in the interpreter on odd shapes, on a GPU at real ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.gemm import gemm as g
from forerun.kernels.gemm.dispatch import (
    SILU_MANY,
    SILU_ROWS,
    TABLE,
    choose,
    choose_silu,
    default,
    default_sm90,
)
from forerun.kernels.gemm.gemm import Config, DeferredNorm, GemmConfig, Matrix
from forerun.kernels.gemm.gemm_sm90 import Form, Sm90Config, stages
from forerun.kernels.runtime import nvrtc as cuda
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of

EPS = 1e-6
GPU = torch.cuda.is_available()
HOPPER = GPU and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


def close(got: Tensor, want: Tensor, limit: float) -> None:
    """‖got - want‖ / ‖want‖; NaN never passes."""
    error = float((got.double() - want).norm() / want.norm())
    assert error < limit, f"relative error {error}"


class Given:
    """Random operands and what float64 makes of them."""

    def __init__(self, rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        self.x, self.residual, self.norm = draw(rows, k), draw(rows, n), draw(n)
        self.matrix = Matrix.of(draw(n, k) * k**-0.5, draw(n))
        assert self.matrix.bias is not None
        w, b = self.matrix.weight.double(), self.matrix.bias.double()
        self.product = self.x.double() @ w.T
        self.y = self.product + b
        # As if a product of 5 tiles had left these rows.
        self.scaled = DeferredNorm(self.x, torch.rand(5, rows, device=device) * k, EPS)
        self.y_scaled = self.product * self.scaled.factor().double() + b


def check_all_forms(given: Given, config: Config, limit: float) -> None:
    m = given.matrix
    close(g.gemm(given.x, m, config), given.y, limit)
    close(g.gemm(given.scaled, m, config), given.y_scaled, limit)
    total = given.y + given.residual.double()
    close(g.gemm_add(given.x, m, given.residual, config), total, limit)
    if isinstance(config, Sm90Config) or (
        config.programs % g.tiles(*given.residual.shape, config) == 0
    ):
        close(g.gemm_partials(given.x, m, config).sum(0), given.product, limit)

    scaled, added = g.gemm_add_deferred_norm(given.x, m, given.residual, given.norm, EPS, config)
    close(added, total, limit)
    normed = F.rms_norm(total, total.shape[1:], given.norm.double(), EPS)
    close(scaled.x * scaled.factor(), normed, limit)

    gate, up = given.y.chunk(2, -1)
    close(g.gemm_silu(given.x, m, config), F.silu(gate) * up, limit)

    ids = g.gemm_argmax(given.x, m, config)
    assert torch.equal(ids, g.gemm(given.x, m, config).argmax(-1))
    assert not m.locks.any()  # as they were found


# (rows, N, K, configuration): tiles that do not divide N or K, splits, W on either side.
SMALL = [
    (1, 64, 128, GemmConfig(16, 32, programs=4)),
    (3, 72, 136, GemmConfig(32, 32, programs=6)),
    (16, 48, 256, GemmConfig(16, 64, programs=12)),
    (17, 40, 96, GemmConfig(32, 32, programs=4, swap=True)),
    (40, 56, 64, GemmConfig(32, 64, programs=1)),
    (5, 80, 224, GemmConfig(16, 32, programs=7)),
    (130, 48, 64, GemmConfig(32, 32, programs=8)),
]


@pytest.mark.skipif(GPU, reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize(("rows", "n", "k", "config"), SMALL)
def test_kernel_in_the_interpreter(rows: int, n: int, k: int, config: GemmConfig) -> None:
    torch.manual_seed(rows)
    check_all_forms(Given(rows, n, k, torch.float32, torch.device("cpu")), config, 1e-6)


@pytest.mark.parametrize(("rows", "n", "k", "config"), SMALL)
def test_twins(
    rows: int, n: int, k: int, config: GemmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch.manual_seed(rows)
    check_all_forms(Given(rows, n, k, torch.float32, torch.device("cpu")), config, 1e-6)


@pytest.mark.skipif(GPU, reason="the interpreter runs where there is no GPU")
def test_a_strided_input() -> None:
    """Rows of a wider tensor, as heads are cut out of a fused product."""
    given = Given(3, 32, 64, torch.float32, torch.device("cpu"))
    wide = torch.full((3, 100), float("nan"))
    wide[:, 5:69] = given.x
    close(g.gemm(wide[:, 5:69], given.matrix, GemmConfig(16, 32)), given.y, 1e-6)


def test_equal_logits_go_to_the_lowest_id() -> None:
    weight = torch.zeros(80, 32)
    weight[[21, 37, 70]] = 1.0
    config = GemmConfig(16, 32)
    ids = g.gemm_argmax(torch.ones(2, 32), Matrix.of(weight), config)
    assert ids.tolist() == [21, 21]


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512])
def test_buckets(rows: int) -> None:
    bucket = g.rows_block(rows)
    assert bucket in (16, 32, 64, 128, 256, 384, 512)
    assert rows <= bucket
    assert bucket == 16 or rows > bucket // 2


def test_default_configurations_fit() -> None:
    """Shared memory, with the deepest pipelining a compiler could make of the stages."""
    for gpu, limit in (
        (GpuInfo(108, amd=False, capability=80), 163 << 10),
        (GpuInfo(304, amd=True, warp_size=64), 64 << 10),
    ):
        for bucket in (16, 32):
            c = default(bucket, gpu)
            assert (c.block_n + bucket) * c.block_k * 2 * c.stages <= limit
            assert c.programs >= gpu.num_sms


def test_tuned_configurations_are_served() -> None:
    """What a launch asserts: locks, and whole programs a tile for descriptors and partial sums."""
    for products in TABLE.values():
        for (n, k), choices in products.items():
            locks = len(Matrix.of(torch.empty(n, k, device="meta")).locks)
            for bucket, c in choices.items():
                assert bucket == g.rows_block(bucket)
                if isinstance(c, Sm90Config):
                    assert k % (64 * c.split) == 0 and c.block_n % (16 * c.cluster) == 0
                    assert stages(c, Form(scaled_in=True)) > 2
                elif c is not None:
                    count = g.tiles(bucket, n, c)
                    assert count <= locks
                    assert not c.parts or c.programs % count == 0
                    assert (c.block_n + bucket) * c.block_k * 2 * c.stages <= 227 << 10


def test_without_a_compiler_the_library_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuInfo(132, amd=False, capability=90)
    monkeypatch.setattr(cuda, "available", lambda: True)
    assert isinstance(choose(24576, 4096, 128, gpu), Sm90Config)
    monkeypatch.setattr(cuda, "available", lambda: False)
    assert choose(24576, 4096, 128, gpu) is None
    assert choose(24576, 4096, 32, gpu) is not None


def test_unknown_shapes_leave_many_rows_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: True)
    for gpu, most in (
        (GpuInfo(132, amd=False, capability=90), 128),
        (GpuInfo(108, amd=False, capability=80), 32),
        (GpuInfo(304, amd=True, warp_size=64), 32),
    ):
        assert choose(1000, 512, most, gpu) is not None
        assert choose(1000, 512, most + 1, gpu) is None
    hopper = GpuInfo(132, amd=False, capability=90)
    for n, k in ((1000, 520), (1004, 512)):  # what its copies and vectors cannot cut
        assert choose(n, k, 64, hopper) is None


def test_silu_goes_into_products_of_many_rows_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: True)
    hopper, other = GpuInfo(132, amd=False, capability=90), GpuInfo(148, amd=False, capability=100)
    for rows in (16, 128, 512, SILU_ROWS - 1):
        assert choose_silu(24576, 4096, rows, hopper) == choose(24576, 4096, rows, hopper)
    many = choose_silu(24576, 4096, SILU_ROWS, hopper)
    assert isinstance(many, Sm90Config) and stages(many, Form(paired=True)) > 3
    assert choose_silu(24576, 4096, SILU_ROWS, other) is None
    assert choose_silu(24584, 4096, SILU_ROWS, hopper) is None


@pytest.mark.parametrize("bucket", [64, 128])
def test_the_default_for_hopper_finds_what_tuning_found(bucket: int) -> None:
    gpu = GpuInfo(132, amd=False, capability=90)
    found = {
        shape: (default_sm90(*shape, bucket, gpu), choices[bucket])
        for shape, choices in TABLE[90].items()
    }
    same = [shape for shape, (ours, tuned) in found.items() if ours == tuned]
    assert {(6144, 4096), (24576, 4096), (4096, 12288)} <= set(same)
    for config, _ in found.values():
        assert config is not None and config.block_n % (16 * config.cluster) == 0
        assert stages(config, Form(scaled_in=True, paired=True)) > 2


REAL = [(6144, 4096), (4096, 12288), (24576, 4096), (151936, 4096), (5000, 2056)]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), REAL)
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_on_a_gpu(rows: int, n: int, k: int) -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(rows)
    config = choose(n, k, rows, gpu_of(device)) or default(g.rows_block(rows), gpu_of(device))
    given = Given(rows, n, k, torch.bfloat16, device)
    check_all_forms(given, config, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [GemmConfig(64, 128, 133), GemmConfig(64, 128, 133, swap=True)])
def test_same_bits_run_after_run_and_whatever_stands_beside(config: GemmConfig) -> None:
    device = torch.device("cuda", 0)
    given = Given(16, 4096, 4096, torch.bfloat16, device)
    first = g.gemm(given.x, given.matrix, config)
    for _ in range(20):
        assert torch.equal(g.gemm(given.x, given.matrix, config), first)
    for rows in (1, 5, 15):
        assert torch.equal(g.gemm(given.x[:rows], given.matrix, config), first[:rows])


# (rows, N, K, configuration): several tiles a program, splits, columns past the end, two and more
# tiles below one another, in a cluster and not.
SM90 = [
    (2, 4096, 1024, Sm90Config(64, groups=1)),
    (16, 6144, 4096, Sm90Config(96, groups=1, cluster=2)),
    (100, 24576, 4096, Sm90Config(192)),
    (128, 4096, 4096, Sm90Config(32)),
    (128, 4096, 12288, Sm90Config(128, groups=1, cluster=2, split=2)),
    (77, 5008, 640, Sm90Config(192)),
    (33, 4096, 1024, Sm90Config(96, groups=1, split=4)),
    (300, 1536, 1024, Sm90Config(64)),
    (512, 24576, 2048, Sm90Config(256, cluster=2)),
    (385, 5008, 1024, Sm90Config(160, groups=1, cluster=2)),
    (500, 5008, 640, Sm90Config(96, groups=1, cluster=2, band=3)),
    (200, 1536, 1024, Sm90Config(64, groups=1, split=2, band=3)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="for Hopper alone")
@pytest.mark.parametrize(("rows", "n", "k", "config"), SM90)
def test_the_kernel_for_hopper(rows: int, n: int, k: int, config: Sm90Config) -> None:
    torch.manual_seed(rows)
    given = Given(rows, n, k, torch.bfloat16, torch.device("cuda", 0))
    check_all_forms(given, config, 5e-3)
    # The same bits run after run, and whatever stands beside a row.
    got = g.gemm(given.scaled, given.matrix, config)
    for _ in range(10):
        assert torch.equal(g.gemm(given.scaled, given.matrix, config), got)
    wide = torch.zeros(rows, k + 9, dtype=torch.bfloat16, device=given.x.device)
    wide[:, 3 : k + 3] = given.x  # not as bulk copies like it
    assert torch.equal(
        g.gemm(wide[:, 3 : k + 3], given.matrix, config), g.gemm(given.x, given.matrix, config)
    )
    fewer = rows - 11 if rows > 20 else rows - 1
    few = DeferredNorm(given.x[:fewer], given.scaled.squares[:, :fewer].contiguous(), EPS)
    assert torch.equal(g.gemm(few, given.matrix, config), got[:fewer])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="for Hopper alone")
@pytest.mark.parametrize(("rows", "n", "k"), [(3000, 24576, 4096), (1024, 6160, 1024)])
def test_silu_of_many_rows(rows: int, n: int, k: int) -> None:
    given = Given(rows, n, k, torch.bfloat16, torch.device("cuda", 0))
    assert choose_silu(24576, 4096, SILU_ROWS, gpu_of(given.x.device)) == SILU_MANY
    gate, up = given.y.chunk(2, -1)
    close(g.gemm_silu(given.x, given.matrix, SILU_MANY), F.silu(gate) * up, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(32, 128, 132),
        pytest.param(
            Sm90Config(32, groups=1),
            marks=pytest.mark.skipif(not HOPPER, reason="for Hopper alone"),
        ),
    ],
)
def test_overlapped_kernels_wait_for_each_other(config: Config) -> None:
    """A chain in a graph, each product's input the last one's output, over fresh inputs."""
    device = torch.device("cuda", 0)
    n = 2048
    matrices = [
        Matrix.of(torch.randn(n, n, device=device, dtype=torch.bfloat16) * n**-0.5)
        for _ in range(12)
    ]
    x = torch.randn(4, n, device=device, dtype=torch.bfloat16)
    norm = torch.ones(n, device=device, dtype=torch.bfloat16)

    def run() -> Tensor:
        rows: Tensor | DeferredNorm = x
        total = x
        for m in matrices:
            rows, total = g.gemm_add_deferred_norm(rows, m, total, norm, EPS, config)
        return total

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        x.normal_()
        graph.replay()
        got = out.clone()
        rows, total = x.double(), x.double()
        for m in matrices:
            total = total + rows @ m.weight.double().T
            rows = F.rms_norm(total, (n,), None, EPS)
        close(got, total, 2e-2)
