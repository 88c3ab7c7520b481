"""GEMMs in a fixed order: a token has the same bits among any number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.gemm.config import Sm90GemmConfig, TritonGemmConfig
from forerun.kernels.gemm.dispatch import choose_fixed_order_gemm
from forerun.kernels.gemm.gemm_triton import _iter_range, max_splits
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.kernels.runtime.jit import jit, tl
from forerun.layers.communication import WeightPlacement
from forerun.layers.gemm import FixedOrderGemm, gemm_for
from forerun.layers.norm import RMSNorm

pytest.importorskip("triton")

COUNTS = (1, 2, 7, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 257, 500, 1000, 2048, 4097, 8192)
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 256), (256, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (100, 72)])
def test_a_token_has_the_same_bits_among_any_number(n: int, k: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    x = torch.randn(max(COUNTS), k, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(max(COUNTS), n, device="cuda", dtype=torch.bfloat16)
    norm = RMSNorm(n, 1e-6, WeightPlacement(torch.bfloat16, weight.device, fixed_order=True))
    norm.weight.uniform_()
    norm.prepare()
    gemm = FixedOrderGemm(weight, None)

    def add(rows: slice) -> Tensor:
        normed, total = gemm.add_rms_norm(x[rows], residual[rows], norm, None)
        assert isinstance(normed, Tensor)
        return torch.cat([normed, total], 1)

    forms: dict[str, Callable[[slice], Tensor]] = {
        "plain": lambda rows: gemm(x[rows]),
        "add": add,
        "silu": lambda rows: gemm.silu_and_mul(x[rows]),
        "argmax": lambda rows: gemm.argmax(x[rows]),
    }
    for name, form in forms.items():
        alone = torch.cat([form(slice(i, i + 1)) for i in range(4)])
        for count in COUNTS:
            assert torch.equal(form(slice(0, count))[:4], alone[:count]), (name, count)
    exact = x[:200].double() @ weight.double().T
    error = (gemm(x[:200]).double() - exact).norm() / exact.norm()
    assert error < 3e-3


@pytest.mark.gpu
def test_a_large_vocabulary() -> None:
    """gpt-oss-20b's LM head, whose K is no multiple of 128: a CTA for each of 18,852 tiles."""
    weight = torch.randn(201088, 2880, device="cuda", dtype=torch.bfloat16) * 2880**-0.5
    x = torch.randn(768, 2880, device="cuda", dtype=torch.bfloat16)
    gemm = FixedOrderGemm(weight, None)
    logits = gemm(x)
    assert torch.equal(logits[700:701], gemm(x[700:701]))
    exact = x[[0, 700]].double() @ weight.double().T
    assert (logits[[0, 700]].double() - exact).norm() / exact.norm() < 3e-3


@jit
def _store_ranges(out, total_iters, num_ctas, SIZE: tl.constexpr):
    cta = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    begin, end = _iter_range(cta, num_ctas, total_iters)
    tl.store(out + 2 * cta, begin, mask=cta < num_ctas)
    tl.store(out + 2 * cta + 1, end, mask=cta < num_ctas)


@pytest.mark.parametrize(
    ("total", "ctas"),
    [(18852 * 23, 18852), (201088 * 23, 201088), (1000, 7), (66 * 40, 132), (1_000_003, 2374)],
)
def test_ctas_share_all_iterations(total: int, ctas: int, device: torch.device) -> None:
    """Where their product exceeds 2^31, too."""
    out = torch.zeros(ctas, 2, dtype=torch.int32, device=device)
    _store_ranges[(-(-ctas // 4096),)](out, total, ctas, 4096)
    cta = torch.arange(ctas + 1)
    bounds = cta * total // ctas
    assert torch.equal(out.cpu().long(), torch.stack([bounds[:-1], bounds[1:]], 1))


@pytest.mark.gpu
def test_weights_without_a_fixed_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        gemm_for(torch.zeros(64, 64, device="cuda"), None, fixed_order=True)


@pytest.mark.parametrize("gpu", [GpuInfo(132, False), GpuInfo(108, False, capability=80)], ids=str)
def test_k_is_divided_by_the_shape_alone(gpu: GpuInfo) -> None:
    """On Hopper into the same halves for any number of tokens, whoever adds them up."""
    for n, k in (*SHAPES, (151936, 4096), (100, 72)):
        divided = set()
        for count in COUNTS:
            for partials in (False, True):
                config = choose_fixed_order_gemm(n, k, count, gpu, partials)
                if isinstance(config, Sm90GemmConfig):
                    assert config.split_k == 1 or partials
                    divided.add(config.split_k * config.k_slices)
                else:
                    assert isinstance(config, TritonGemmConfig)
                    steps = -(-k // config.block_k)
                    assert max_splits(config.num_ctas, config.num_ctas, steps) == 1
                    divided.add(1)
        assert len(divided) == 1
