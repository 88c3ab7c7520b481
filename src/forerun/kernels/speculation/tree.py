# mypy: allow-untyped-defs, allow-incomplete-defs
"""Draft trees: their shape, the path that a verify pass accepts, and the compaction of its K/V.

A request has W nodes in a step: node 0 is `last_token`, the root; node i + 1 is draft i, and its
parent is an earlier node. A node attends to the context and to its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.kernels.runtime.fp8 import as_bits
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

MAX_NODES = 256  # of a tree, the root included
WORD_BITS = 64  # nodes that an int64 of a mask has bits for
TILE = 8192  # elements of a pool that a CTA of `compact_kv` holds


@dataclass(frozen=True)
class Tree:
    """B trees of W nodes."""

    parents: Tensor  # [B, W] int64; 0 for the root
    depth: Tensor  # [B, W] int32; 0 for the root
    # [B, W, words] int64, 64 bits a word; bit j of node i: node j is an ancestor of i, or i itself.
    ancestors: Tensor

    @classmethod
    def from_parents(cls, parents: Tensor) -> Tree:
        """`parents` [B, W - 1] int64 of the drafted nodes: each is an earlier node."""
        if not use_triton(parents):
            return cls(*tree_shape_ref(parents))
        batch, nodes = parents.shape[0], parents.shape[1] + 1
        words = mask_words(nodes)
        tree = cls(
            parents.new_empty(batch, nodes),
            parents.new_empty(batch, nodes, dtype=torch.int32),
            parents.new_empty(batch, nodes, words),
        )
        block = triton.next_power_of_2(nodes)
        _tree_shape[(batch,)](
            parents, tree.parents, tree.depth, tree.ancestors, parents.stride(0), nodes,
            BLOCK=block, ROUNDS=block.bit_length() - 1, WORDS=words,
            num_warps=1 if block <= 64 else 4, **pdl_options(parents),
        )  # fmt: skip
        return tree

    @property
    def above(self) -> Tensor:
        """[B, W] int64: the parents; -1 for the root."""
        return self.parents - (self.depth == 0).long()

    def accept(self, candidates: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """The longest path on which every draft is what the target sampled at its parent.

        Siblings hold different tokens, or the later one is taken. A node of invalid logits
        (INVALID_TOKEN) ends the path.

        Args:
            candidates: [B, W - 1] int64: the drafts that may be accepted, else -1.
            sampled: [B, W] int64, y_i ~ p_i at every node.

        Returns:
            path [B, W] int64: the accepted nodes from the root on, past the path's end the index
            itself; num_committed [B] int32: the path's length. The token committed for node
            path[i] is sampled[path[i]].
        """
        if not use_triton(candidates):
            return accept_path_ref(self, candidates, sampled)
        batch, nodes = sampled.shape
        path, num_committed = torch.empty_like(self.parents), self.depth.new_empty(batch)
        block = triton.next_power_of_2(nodes)
        _accept_path[(batch,)](
            candidates, sampled, self.parents, self.depth, self.ancestors, path, num_committed,
            candidates.stride(0), sampled.stride(0), nodes,
            BLOCK=block, WORDS=mask_words(nodes),
            num_warps=1 if block <= 16 else 4 if block <= 64 else 8, **pdl_options(candidates),
        )  # fmt: skip
        return path, num_committed


def mask_words(nodes: int) -> int:
    """The words of a mask over so many nodes."""
    return -(-nodes // WORD_BITS)


def pack_bits(seen: Tensor) -> Tensor:
    """[..., n] bool -> [..., words] int64, lowest bit first."""
    count = seen.shape[-1]
    padded = pad(seen.long(), (0, -count % WORD_BITS))
    bit = torch.arange(WORD_BITS, device=seen.device)
    words: Tensor = padded.unflatten(-1, (-1, WORD_BITS))
    return (words << bit).sum(-1)


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """[..., words] int64 -> [..., count] bool, which `pack_bits` has packed."""
    bit = torch.arange(WORD_BITS, device=words.device)
    return (((words.unsqueeze(-1) >> bit) & 1) != 0).flatten(-2)[..., :count]


def tree_shape_ref(parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reference implementation of `Tree.from_parents`: (parents, depth, ancestors).

    By doubling: after n rounds the ancestors up to 2^n levels above are known.
    """
    batch, nodes = parents.shape[0], parents.shape[1] + 1
    index = torch.arange(nodes, device=parents.device)
    up = torch.minimum(parents, index[:-1]).clamp_min(0)
    up = torch.cat([parents.new_zeros(batch, 1), up], 1)
    ancestors = pack_bits(index.unsqueeze(1) == index).expand(batch, -1, -1)
    depth, jump = (index > 0).int().expand(batch, -1), up
    for _ in range((nodes - 1).bit_length()):
        ancestors = ancestors | ancestors.gather(1, jump.unsqueeze(2).expand_as(ancestors))
        depth = depth + depth.gather(1, jump)
        jump = jump.gather(1, jump)
    return up, depth, ancestors


def accept_path_ref(tree: Tree, candidates: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Reference implementation of `Tree.accept`."""
    index = torch.arange(sampled.shape[1], device=candidates.device)
    agree = (candidates == sampled.gather(1, tree.parents[:, 1:])) & (candidates >= 0)
    failed = pack_bits(pad(~agree, (1, 0))).unsqueeze(1)
    # A node is accepted if no node on the way to it failed.
    accepted = (tree.ancestors & failed == 0).all(2)
    here = accepted.unsqueeze(1) & (tree.depth.unsqueeze(1) == index.unsqueeze(1))  # [B, depth, W]
    path = torch.where(here, index, -1).amax(2)
    num_committed = torch.where(accepted, tree.depth, 0).amax(1) + 1
    return torch.where(path < 0, index, path), num_committed.int()


def compact_kv_ref(data: Tensor, kv_slots: Tensor, path: Tensor) -> None:
    """Reference implementation of `compact_kv`."""
    flat = as_bits(data).flatten(2, 3)
    flat[:, :, kv_slots.flatten()] = flat[:, :, kv_slots.gather(1, path).flatten()]


def compact_kv(data: Tensor, kv_slots: Tensor, path: Tensor) -> None:
    """Moves the K/V of each tree's accepted path to where a chain would have left it.

    Node i of every request gets what its node path[i] holds, in every layer of the pool. All nodes
    are read before any is written.

    Args:
        data: [2, L, pages, P, Hkv, D], any dtype, contiguous.
        kv_slots: [B, W] int64, where each node's K/V is in the flattened pool.
        path: [B, W] int64, of `Tree.accept`.
    """
    if not use_triton(data):
        compact_kv_ref(data, kv_slots, path)
        return
    bits = as_bits(data)
    size, layers = bits.shape[4] * bits.shape[5], bits.shape[0] * bits.shape[1]
    block = triton.next_power_of_2(kv_slots.shape[1])
    chunk = min(TILE // block, triton.next_power_of_2(size))
    _compact_kv[(kv_slots.shape[0], layers, triton.cdiv(size, chunk))](
        bits, kv_slots, path, bits.stride(1), kv_slots.shape[1],
        SIZE=size, BLOCK=block, CHUNK=chunk, num_warps=4,
    )  # fmt: skip


@jit
def _tree_shape(
    parents, up_ptr, depth_ptr, ancestors_ptr, parents_stride, nodes,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request; by doubling, as the reference."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    drafted = (i > 0) & (i < nodes)
    up = tl.load(parents + request * parents_stride + i - 1, mask=drafted, other=0)
    up = tl.maximum(tl.minimum(up, (i - 1).to(tl.int64)), 0)
    node = request * nodes + i
    tl.store(up_ptr + node, up, mask=i < nodes)
    depth = (i > 0).to(tl.int32)
    for word in tl.static_range(WORDS):
        ancestors = (i * 0 + 1).to(tl.int64) << (i & 63).to(tl.int64)
        if WORDS > 1:
            ancestors = tl.where(i // 64 == word, ancestors, 0)
        jump = up.to(tl.int32)
        for _ in tl.static_range(ROUNDS):
            ancestors |= tl.gather(ancestors, jump, 0)
            if word == 0:
                depth += tl.gather(depth, jump, 0)
            jump = tl.gather(jump, jump, 0)
        tl.store(ancestors_ptr + node * WORDS + word, ancestors, mask=i < nodes)
    tl.store(depth_ptr + node, depth, mask=i < nodes)


@jit
def _accept_path(
    candidates, sampled_ptr, up_ptr, depth_ptr, ancestors_ptr, path_ptr, num_committed,
    candidates_stride, sampled_stride, nodes,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    node, inside, drafted = request * nodes + i, i < nodes, (i > 0) & (i < nodes)
    draft = tl.load(candidates + request * candidates_stride + i - 1, mask=drafted, other=-1)
    up = tl.load(up_ptr + node, mask=inside, other=0)
    sampled = tl.load(sampled_ptr + request * sampled_stride + up, mask=inside, other=-1)
    bit = (i * 0 + 1).to(tl.int64) << (i & 63).to(tl.int64)
    disagrees = drafted & ((draft != sampled) | (draft < 0))
    accepted = inside
    for word in tl.static_range(WORDS):
        failed = tl.sum(tl.where(disagrees & (i // 64 == word), bit, 0), 0)
        ancestors = tl.load(ancestors_ptr + node * WORDS + word, mask=inside, other=0)
        accepted &= (ancestors & failed) == 0
    depth = tl.load(depth_ptr + node, mask=inside, other=0)
    tl.store(num_committed + request, tl.max(tl.where(accepted, depth, 0), 0) + 1)
    step = tl.where(accepted, depth, -1)
    ROWS: tl.constexpr = BLOCK if BLOCK < 64 else 64  # depths that registers hold at once
    for first in tl.static_range(0, BLOCK, ROWS):
        row = first + tl.arange(0, ROWS)
        path = tl.max(tl.where(step[None, :] == row[:, None], i[None, :], -1), 1)
        path = tl.where(path < 0, row, path).to(tl.int64)
        tl.store(path_ptr + request * nodes + row, path, mask=row < nodes)


@jit
def _compact_kv(
    data, kv_slots, path_ptr, layer_stride, nodes,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One CTA per CHUNK elements of all nodes of a request, in one layer of K or V."""
    request, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    path = tl.load(path_ptr + request * nodes + i, mask=i < nodes, other=0).to(tl.int32)
    moved = (i < nodes) & (path != i)
    source = tl.load(kv_slots + request * nodes + path, mask=moved, other=0)
    target = tl.load(kv_slots + request * nodes + i, mask=moved, other=0)
    column = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = moved[:, None] & (column < SIZE)[None, :]
    data += layer * layer_stride
    values = tl.load(data + source[:, None] * SIZE + column[None, :], mask=mask)
    tl.debug_barrier()  # one thread may write what another still has to read
    tl.store(data + target[:, None] * SIZE + column[None, :], values, mask=mask)
