"""Sums, gathers and maxima over peer memory: all_reduce_sm90.py, exchange_sm90.py.

On one GPU the ranks are streams, whose kernels wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from forerun.kernels.communication import all_reduce_sm90, exchange_sm90, peers
from forerun.kernels.communication.all_reduce_sm90 import (
    MAX_TOKENS,
    Variant,
    all_reduce,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_ref,
)
from forerun.kernels.communication.peers import PeerBuffers
from forerun.kernels.runtime import nvrtc
from tests.kernels.test_cuda import assert_compiles_well

EPS = 1e-6
T = TypeVar("T")


def test_which_tensors_fit() -> None:
    fits = all_reduce_sm90.fits
    assert fits(torch.zeros(1, 4096, dtype=torch.bfloat16))
    assert fits(torch.zeros(4, MAX_TOKENS, 2048))  # split-K partials
    assert fits(torch.zeros(8, 2, 2048, dtype=torch.bfloat16))  # outputs of experts
    assert not fits(torch.zeros(1, 4096))
    assert not fits(torch.zeros(MAX_TOKENS + 1, 4096, dtype=torch.bfloat16))
    assert not fits(torch.zeros(1, 2880, dtype=torch.bfloat16))
    assert not fits(torch.zeros(1, 16384, dtype=torch.bfloat16))
    assert not fits(torch.zeros(2, 4097, dtype=torch.bfloat16)[:, 1:])
    assert not peers.serves(torch.device("cpu"))


def test_the_reference_rounds_what_crosses() -> None:
    x = torch.tensor([[1.0, 2**-9], [3.0, 4.0]]).view(2, 1, 2)  # parts of one rank
    other = torch.tensor([[2.0, 1.0]], dtype=torch.bfloat16)
    residual = torch.tensor([[0.5, 0.0]], dtype=torch.bfloat16)
    weight = torch.ones(2, dtype=torch.bfloat16)
    normed, total = all_reduce_add_rms_norm_ref([x, other], residual, weight, EPS)
    assert total.tolist() == [[6.5, 5.0]]  # 4 + 2^-9 is 4 in bfloat16
    want = torch.nn.functional.rms_norm(total.float(), (2,), None, EPS)
    assert torch.equal(normed, want.bfloat16())


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
@pytest.mark.parametrize(
    "variant",
    [
        Variant(5120, 2, 1, 4, is_float=True, norm=True),
        Variant(8192, 8, 7, 16, is_float=False, norm=True),
        Variant(2048, 2, 0, 1, is_float=False, norm=False),
    ],
    ids=str,
)
def test_it_compiles(variant: Variant) -> None:
    assert_compiles_well(all_reduce_sm90.cuda_source(variant))


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
@pytest.mark.parametrize("what", exchange_sm90.KINDS)
def test_exchanges_compile(what: str) -> None:
    assert_compiles_well(exchange_sm90.cuda_source(what, 8, 3))


def test_which_numbers_are_exchanged() -> None:
    assert exchange_sm90.fits(torch.zeros(512, 2, 64, dtype=torch.int32))
    assert not exchange_sm90.fits(torch.zeros(513, 2, 64, dtype=torch.int32))
    assert not exchange_sm90.fits(torch.zeros(8, dtype=torch.bfloat16))
    assert exchange_sm90.fits_max(torch.zeros(8)) and exchange_sm90.fits_max(torch.arange(8))
    assert not exchange_sm90.fits_max(torch.zeros(8, dtype=torch.int32))


@pytest.fixture(scope="module")
def device() -> torch.device:
    device = torch.device("cuda")
    if not peers.serves(device):
        pytest.skip("for Hopper")
    return device


class Group:
    """Ranks on one GPU, each with its stream."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        size = peers.buffer_bytes(ranks)
        self.buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
        addresses = torch.tensor([b.data_ptr() for b in self.buffers], device=device)
        states = [torch.zeros(2, dtype=torch.int32, device=device) for _ in range(ranks)]
        self.peers = [PeerBuffers(rank, addresses, states[rank], 20) for rank in range(ranks)]
        self.streams = [torch.cuda.Stream(device) for _ in range(ranks)]

    def run(self, call: Callable[[int], T]) -> list[T]:
        """`call` of every rank, at the same time.

        As graphs: while a kernel waits for another one, nothing is loaded or allocated.
        """
        graphs, out = [torch.cuda.CUDAGraph() for _ in self.peers], []
        for rank, graph in enumerate(graphs):
            with torch.cuda.graph(graph, stream=self.streams[rank]):
                out.append(call(rank))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, self.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        return out

    def load(self, x: Tensor, norm: bool) -> None:
        """The kernels of all ranks."""
        parts, is_float = x.shape[0] if x.dim() == 3 else 1, x.dtype == torch.float32
        for rank, ranks in enumerate([len(self.peers)] * len(self.peers)):
            variant = Variant(x.shape[-1], ranks, rank, parts, is_float, norm)
            all_reduce_sm90._load_kernel(x.device, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("hidden", [256, 5120, 8192])
def test_sums_and_norms(hidden: int, ranks: int, device: torch.device) -> None:
    """Calls of several sizes, one after the other: no call reads what another one has left."""
    group, random = Group(ranks, device), torch.Generator(device).manual_seed(hidden)
    weight = torch.rand(hidden, generator=random, device=device).bfloat16()
    for tokens in (1, 3, 8, 1, 16 // ranks):  # all CTAs of all ranks run at once
        for parts, dtype in ((0, torch.bfloat16), (4, torch.float32), (8, torch.bfloat16)):
            shape = (parts, tokens, hidden) if parts else (tokens, hidden)
            xs = [
                torch.randn(shape, generator=random, device=device).to(dtype) for _ in range(ranks)
            ]
            residual = torch.randn(tokens, hidden, generator=random, device=device).bfloat16()
            want = all_reduce_add_rms_norm_ref(xs, residual, weight, EPS)
            group.load(xs[0], norm=True)
            results = group.run(
                lambda rank, xs=xs, residual=residual: all_reduce_add_rms_norm(
                    xs[rank], residual, weight, EPS, group.peers[rank]
                )
            )
            for got in results:
                assert all(torch.equal(a, b) for a, b in zip(got, results[0], strict=True))
                torch.testing.assert_close(got[1], want[1], rtol=2**-7, atol=2**-5)
                torch.testing.assert_close(got[0], want[0], rtol=2**-6, atol=2**-6)
            if not parts:
                group.load(xs[0], norm=False)
                first, *others = group.run(
                    lambda rank, xs=xs: all_reduce(xs[rank], group.peers[rank])
                )
                assert all(torch.equal(first, other) for other in others)
                torch.testing.assert_close(
                    first.float(), torch.stack(xs).float().sum(0), rtol=2**-8, atol=2**-6
                )


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges(ranks: int, device: torch.device) -> None:
    """Odd numbers of words, rows that end within a line, calls of other sizes in between."""
    group, random = Group(ranks, device), torch.Generator(device).manual_seed(ranks)
    for what in exchange_sm90.KINDS:
        for rank in range(ranks):
            exchange_sm90._load_kernel(device, what, ranks, rank)

    def numbers(*shape: int) -> list[Tensor]:
        limits = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        return [
            torch.randint(*limits, shape, generator=random, device=device) for _ in range(ranks)
        ]

    for shape in ((1, 1), (3, 5), (16, 2, 64), (1, 1), (40, 7)):
        whole = numbers(*shape)
        narrow = [each.to(torch.int32) for each in numbers(*shape)]
        floats = [torch.randn(shape, generator=random, device=device) for _ in range(ranks)]
        floats[0][0] = -torch.inf
        floats[-1][-1] = torch.inf
        for xs in (whole, narrow, floats):
            want = torch.cat(xs, -1)
            run = exchange_sm90.all_gather
            results = group.run(lambda rank, xs=xs, run=run: run(xs[rank], group.peers[rank]))
            assert all(torch.equal(got, want) for got in results)
        for xs in (whole, floats):
            want = torch.stack(xs).amax(0)
            run = exchange_sm90.all_reduce_max
            results = group.run(lambda rank, xs=xs, run=run: run(xs[rank], group.peers[rank]))
            assert all(torch.equal(got, want) for got in results)
