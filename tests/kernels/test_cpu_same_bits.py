"""What the CPU kernels compute for a token has the same bits in any batch, with any threads.

At every level: tiles of one row and of several are different code, and compilers choose by CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from forerun.attention.base import AttentionSpec
from forerun.attention.capabilities import LayerMask
from forerun.kernels.cpu import attention, gemm, library, norm
from forerun.kernels.cpu.gemm import Format
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms, RopePositions
from forerun.kernels.speculation.tree import unpack_bits
from tests.kernels.attention_support import random_tree
from tests.kernels.cpu_levels import at_levels
from tests.kernels.test_cpu_attention import PAGE, Pair
from tests.kernels.test_cpu_gemm import epilogues, operands

pytestmark = [
    pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("level"),
    at_levels("native"),
]

DTYPES = (torch.float32, torch.bfloat16)
CODES = (Format.GROUPED, Format.GROUPED_INT8)  # in test_cpu_grouped.py
FORMATS = [(format, torch.float32) for format in Format if format not in CODES]
FORMATS += [(Format.BFLOAT16, torch.bfloat16), (Format.INT8, torch.bfloat16)]
SPANS = ((0, 1), (3, 2), (5, 4), (9, 7), (11, 16), (1, 32), (30, 200))  # first row, rows


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_rows(compute: Callable[[int, int], list[torch.Tensor]], rows: int) -> None:
    """`compute(first, count)`: results of these rows, each with rows as its first dimension."""
    torch.set_num_threads(1)
    whole = compute(0, rows)
    for threads, (first, count) in product((1, 2, 3), SPANS):
        torch.set_num_threads(threads)
        for part, full in zip(compute(first, count), whole, strict=True):
            assert torch.equal(part, full[first : first + count])


@pytest.mark.parametrize(("format", "dtype"), FORMATS)
def test_gemm(format: Format, dtype: torch.dtype) -> None:
    x, weight, bias = operands(513, 96, dtype, tokens=230)
    w = gemm.pack(weight, bias, format)
    check_rows(lambda first, count: [gemm.gemm(x[first : first + count], w)], 230)


@pytest.mark.parametrize(("format", "dtype"), FORMATS)
def test_epilogues(format: Format, dtype: torch.dtype) -> None:
    x, weight, bias = operands(138, 70, dtype, tokens=230)
    w = gemm.pack(weight, bias, format)
    residual = torch.randn(230, w.n, generator=torch.Generator().manual_seed(1)).to(dtype)
    check_rows(lambda first, count: epilogues(x, w, residual, slice(first, first + count)), 230)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, y, weight = (torch.randn(230, 99).to(dtype) for _ in range(3))

    def compute(first: int, count: int) -> list[torch.Tensor]:
        rows, others = x[first : first + count], y[first : first + count]
        return [
            norm.rms_norm(rows, weight[0], 1e-6),
            *norm.add_rms_norm(rows, others, weight[0], 1e-6),
        ]

    check_rows(compute, 230)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_writes(dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 3, 2, 36
    qkv = torch.randn(230, (heads + 2 * kv_heads) * dim).to(dtype)
    table = torch.randn(230, 2, 1, dim).to(dtype)
    norms = HeadNorms(torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-6)

    def compute(first: int, count: int) -> list[torch.Tensor]:
        rows = torch.arange(first, first + count)
        k, v = torch.zeros(2, 15, 16, kv_heads, dim, dtype=dtype)
        rope = RopePositions(table, rows)
        q = attention.qk_norm_rope_write(qkv[rows], heads, norms, rope, rows, k, v)
        return [q, k.flatten(0, 1)[rows], v.flatten(0, 1)[rows]]

    check_rows(compute, 230)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("window", "heads", "dtype"),
    [
        (None, (4, 4, 64), torch.float32),  # a row of a K/V head: multiplied in another way
        (None, (4, 2, 64), torch.float32),
        (700, (4, 2, 64), torch.float32),
        (None, (4, 1, 64), torch.bfloat16),
        (None, (3, 1, 20), torch.float32),
        (None, (4, 4, 34), torch.float32),
    ],
)
def test_attention(window: int | None, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The last pages of two requests: 24 tokens in one pass, in chunks, and single ones."""
    pair = Pair([1015, 60], heads, dtype)
    spec = AttentionSpec(LayerMask(window=window), 0.125)
    plan, attend = pair.ours.plan, pair.ours.attend
    q = pair.queries(2 * 24)
    torch.set_num_threads(1)
    whole = attend(plan(pair.batch(24)), 0, spec, q).view(2, 24, *q.shape[1:])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for batch in (pair.batch(24), pair.ragged([24, 24])):
            assert torch.equal(attend(plan(batch), 0, spec, q).view_as(whole), whole)
        for offset, tokens in ((0, 1), (7, 1), (23, 1), (10, 2), (3, 5)):
            few = replace(pair.batch(tokens), start=pair.start + offset)
            part = slice(offset, offset + tokens)
            rows = q.view_as(whole)[:, part].flatten(0, 1)
            assert torch.equal(attend(plan(few), 0, spec, rows), whole[:, part].flatten(0, 1))


@pytest.mark.covering(0)
@pytest.mark.parametrize("heads", [(4, 4, 64), (4, 2, 64), (3, 1, 20)])
def test_trees(heads: tuple[int, int, int]) -> None:
    """A tree's token has the bits of a chain of its ancestors, whose K/V is where theirs was."""
    width, dtype = 70, torch.bfloat16
    pair = Pair([1015, 60], heads, dtype)
    spec, plan = AttentionSpec(LayerMask(), 0.125), pair.ours.plan
    words = torch.tensor([random_tree(width, pair.draw) for _ in range(2)])
    q = pair.queries(2 * width)
    torch.set_num_threads(2)
    whole = pair.ours.attend(plan(pair.batch(width, tree=words)), 0, spec, q).view(2, width, -1)
    pools = pair.pools.k(0), pair.pools.v(0)
    kept = [pool.clone() for pool in pools]
    for node in (0, 1, 7, 30, width - 1):
        path = unpack_bits(words[:, node], width)
        for request, seen in enumerate(path):
            at = pair.start[request] + seen.nonzero().flatten()
            to = pair.start[request] + torch.arange(len(at))
            slots, new = (pair.table[request, p // PAGE].long() * PAGE + p % PAGE for p in (at, to))
            for pool, old in zip(pools, kept, strict=True):
                pool.copy_(old)
                pool.flatten(0, 1)[new] = old.flatten(0, 1)[slots]
            one = replace(pair.batch(1), start=pair.start + len(at) - 1)
            rows = q.view(2, width, *q.shape[1:])[:, node]
            got = pair.ours.attend(plan(one), 0, spec, rows.contiguous())
            assert torch.equal(got[request].flatten(), whole[request, node])
