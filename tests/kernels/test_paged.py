"""KV slots and K/V writes: kernels against their reference implementations."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.attention.paged_kv import (
    compute_kv_slots,
    compute_kv_slots_ref,
    write_kv,
    write_kv_ref,
)

pytest.importorskip("triton")

FP8 = torch.float8_e4m3fn


def table(batch: int, pages: int, device: torch.device) -> torch.Tensor:
    ids = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)) + 1
    return ids.view(batch, pages).int().to(device)


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("q_len", [1, 5, 64])
def test_fixed_q_len(page: int, q_len: int, device: torch.device) -> None:
    start = torch.tensor([0, 3, 2 * page - 1], dtype=torch.int32, device=device)
    pages = table(3, 2 + (q_len + page) // page, device)
    total = 3 * q_len
    got = compute_kv_slots(pages, start, None, q_len, total, page)
    want = compute_kv_slots_ref(pages, start, None, q_len, total, page)
    assert got.tolist() == want.tolist()
    position = int(start[2]) + q_len - 1  # the last token, by the definition
    expected = int(pages[2, position // page]) * page + position % page
    assert got[-1] == expected


@pytest.mark.parametrize("page", [1, 16])
def test_ragged_chunks(page: int, device: torch.device) -> None:
    spans = [(0, 3), (9, 70), (5, 1)]
    cu_q_lens = torch.tensor([0, 3, 73, 74], dtype=torch.int32, device=device)
    start = torch.tensor([s for s, _ in spans], dtype=torch.int32, device=device)
    pages = table(3, 80, device)
    got = compute_kv_slots(pages, start, cu_q_lens, 70, 74, page).tolist()
    assert got == compute_kv_slots_ref(pages, start, cu_q_lens, 70, 74, page).tolist()
    at = [(b, s + i) for b, (s, n) in enumerate(spans) for i in range(n)]
    assert got == [int(pages[b, p // page]) * page + p % page for b, p in at]


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16, FP8], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (1, 80), (8, 256)])
def test_write_kv(heads: int, dim: int, pool_dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(5, 4 * heads, dim, generator=generator).to(device) * 30
    k, v = qkv[:, heads : 2 * heads], qkv[:, 3 * heads :]
    kv_slots = torch.tensor([7, 33, 0, 12, 5], device=device)
    pools = [torch.zeros(2, 3, 16, heads, dim, device=device).to(pool_dtype) for _ in range(2)]
    write_kv(k, v, kv_slots, *pools[0])
    write_kv_ref(k, v, kv_slots, *pools[1])
    assert torch.equal(pools[0].float(), pools[1].float())
    assert torch.equal(pools[0][0].flatten(0, 1)[kv_slots].float(), k.to(pool_dtype).float())


def test_float8_rounds_as_torch_does(device: torch.device) -> None:
    """Every float8 value, the midpoints between two, their neighbours, and values out of range."""
    values = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # 0 to 448
    midpoints = (values[1:] + values[:-1]) / 2
    edges = (midpoints, midpoints.nextafter(values[1:]), midpoints.nextafter(values[:-1]))
    x = torch.cat((values, *edges, torch.tensor([449.0, 1e6, 1e-9, 2**-10])))
    x = torch.cat((x, -x, torch.zeros(64)))[: 16 * 64].view(-1, 1, 64).to(device)
    pool = torch.zeros(2, x.shape[0], 1, 1, 64, device=device).to(FP8)
    write_kv(x, x, torch.arange(x.shape[0], device=device), pool[0], pool[1])
    assert torch.equal(pool[0].float().flatten(), x.clamp(-448, 448).to(FP8).float().flatten())
