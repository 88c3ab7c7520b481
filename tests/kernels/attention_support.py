"""Random paged K/V, and attention over it by its definition, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.kernels.attention.decode import BLOCK, CAUSAL, SLIDING_BLOCK, TREE, MaskSpec
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.speculation.ragged import RaggedRows, pack_tokens_ref


@dataclass
class Paged:
    """Requests whose pages lie in a shuffled pool; K/V past their tokens is NaN."""

    q: Tensor  # [T, Hq, D]
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    start: Tensor
    spans: list[tuple[int, int]]
    scale: float
    tree: Tensor | None = None

    @property
    def kv(self) -> PagedKV:
        return PagedKV(self.k_pool, self.v_pool, self.table, self.start)

    def mask(self, mask: MaskSpec) -> MaskSpec:
        """With the bits of this case's tree, for TREE."""
        return replace(mask, tree=self.tree) if mask.mask == TREE else mask

    def reference(self, mask: MaskSpec) -> Tensor:
        """[T, Hq, D] float64: every query token by itself."""
        page = self.k_pool.shape[1]
        group = self.q.shape[1] // self.k_pool.shape[2]
        out, t = [], 0
        for b, (start, count) in enumerate(self.spans):
            position = torch.arange(start + count, device=self.q.device)
            index = self.table[b, position // page].long() * page + position % page
            k, v = (
                pool.flatten(0, 1)[index].double().repeat_interleave(group, 1)
                for pool in (self.k_pool.float(), self.v_pool.float())
            )
            for token in range(count):
                seen = attended(position, start, count, token, mask, self._bits(t))
                s = torch.einsum("hd,nhd->hn", self.q[t].double(), k[seen]) * self.scale
                if mask.softcap is not None:
                    s = mask.softcap * torch.tanh(s / mask.softcap)
                if mask.sinks is not None:  # a score whose value is zero
                    s = torch.cat((s, mask.sinks.double()[:, None]), 1)
                weights = s.softmax(1)[:, : len(v[seen])]
                out.append(torch.einsum("hn,nhd->hd", weights, v[seen]))
                t += 1
        return torch.stack(out)

    def _bits(self, t: int) -> int:
        """The mask of a query token as one number."""
        words = [] if self.tree is None else self.tree[t].tolist()
        return sum((word % (1 << 64)) << 64 * i for i, word in enumerate(words))


def attended(
    position: Tensor, start: int, count: int, token: int, mask: MaskSpec, bits: int
) -> Tensor:
    """Which positions a query token attends to."""
    if mask.mask == CAUSAL:
        oldest = 0 if mask.window is None else start + token - mask.window + 1
        return (position >= oldest) & (position <= start + token)
    if mask.mask == BLOCK:
        return position >= (0 if mask.window is None else start - mask.window)
    if mask.mask == SLIDING_BLOCK:
        assert mask.window is not None
        return (position - (start + token)).abs() < mask.window
    marked = [start + j for j in range(count) if bits >> j & 1]
    oldest = 0
    if mask.window is not None:  # the last of the context and the path to the token
        last = start + len(marked) - 1
        oldest = last - mask.window + 1
        marked = marked[-mask.window :]
    return ((position < start) & (position >= oldest)) | torch.isin(
        position, position.new_tensor(marked)
    )


def random_tree(count: int, generator: torch.Generator) -> list[list[int]]:
    """Ancestor bits of each node, itself included, in words; node 0 is the root."""
    parents = [int(torch.randint(node, (), generator=generator)) for node in range(1, count)]
    return tree_words(parents)


def tree_words(parents: list[int]) -> list[list[int]]:
    """Ancestor bits of the root and of nodes with these parents: words of 64 bits, signed."""
    bits = [1]
    for node, parent in enumerate(parents, 1):
        bits.append(bits[parent] | 1 << node)
    words = [[b >> i & (1 << 64) - 1 for i in range(0, len(bits), 64)] for b in bits]
    return [[w - (1 << 64) if w >> 63 else w for w in each] for each in words]


def ragged_rows(widths: list[int], most: int, device: torch.device) -> RaggedRows:
    """The rows of a pass in which requests have so many tokens, at most `most`."""
    count = torch.tensor(widths, dtype=torch.int32, device=device)
    ids = torch.zeros(len(widths), most, dtype=torch.int64, device=device)
    flat = ids.flatten()
    return pack_tokens_ref(count, sum(widths), ids, ids[:, 1:].clone(), flat, flat).rows


def make_paged(
    spans: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    padded: int = 0,
) -> Paged:
    """`padded`: padding slots are added, each with start 0 and a page table of zeros."""
    generator = torch.Generator().manual_seed(seed)
    used = [-(-(start + count) // page) for start, count in spans]
    ids = torch.randperm(sum(used), generator=generator) + 1
    table = torch.zeros(len(spans) + padded, max(used) + 1, dtype=torch.int32)
    total = sum(used) + 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # A token's q is a view into a wider row, as the QKV GEMM returns it.
    q_len = spans[0][1]
    total_q = sum(count for _, count in spans) + padded * q_len
    q = normal(total_q, heads + 2 * kv_heads, dim).to(dtype)[:, :heads]
    pools = normal(2, total, page, kv_heads, dim)
    owned = torch.zeros(total, page, dtype=torch.bool)
    first = 0
    for b, (start, count) in enumerate(spans):
        table[b, : used[b]] = ids[first : first + used[b]]
        position = torch.arange(start + count)
        owned[table[b, position // page].long(), position % page] = True
        first += used[b]
    owned[0, :] = True
    pools[:, ~owned] = float("nan")
    k_pool, v_pool = pools.to(kv_dtype or dtype).to(device).unbind(0)
    spans = spans + [(0, q_len)] * padded
    alike = all(n == q_len for _, n in spans)
    tree = [words for _, n in spans if alike for words in random_tree(n, generator)]
    return Paged(
        q.to(device),
        k_pool,
        v_pool,
        table.to(device),
        torch.tensor([start for start, _ in spans], dtype=torch.int32, device=device),
        spans,
        dim**-0.5,
        torch.tensor(tree, dtype=torch.int64, device=device) if alike else None,
    )


def with_large_queries(case: Paged) -> Paged:
    """Queries of 10^5, which float16 does not have: the keys' first element alone decides."""
    first = torch.arange(case.q.shape[2], device=case.q.device) == 0
    case.q = torch.where(first, 1e5, 0.0).to(case.q.dtype).expand(case.q.shape).clone()
    return case


def relative_error(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; NaN where either has one."""
    return float((out.double() - expected).norm() / expected.norm())
