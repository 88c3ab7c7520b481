# mypy: allow-untyped-defs, allow-incomplete-defs
"""Draft trees: their shape from parents, what a verify pass accepts of them, K/V moved together.

The rows of a request in a step: row 0 is the newest token, the root; row i + 1 holds drafted token
i, and its parent is an earlier row. A row attends to the context and to its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.runtime.fp8 import as_bits
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

MAX_ROWS = 64  # rows of a tree, the root included: the bits of an int64
TILE = 8192  # elements of a pool that a program of `move_rows` holds


@dataclass(frozen=True)
class Tree:
    """B trees of W rows."""

    parents: Tensor  # [B, W] int64, a root's is 0
    depth: Tensor  # [B, W] int32, a root's is 0
    bits: Tensor  # [B, W] int64: bit j of row i: it descends from row j, or is it

    @classmethod
    def of(cls, parents: Tensor) -> Tree:
        """From parents [B, W - 1] int64 of the drafted rows, each below its own row."""
        if not use_triton(parents):
            return cls(*tree_shape_ref(parents))
        batch, rows = parents.shape[0], parents.shape[1] + 1
        made = cls(
            parents.new_empty(batch, rows),
            parents.new_empty(batch, rows, dtype=torch.int32),
            parents.new_empty(batch, rows),
        )
        block = triton.next_power_of_2(rows)
        _shape[(batch,)](
            parents, made.parents, made.depth, made.bits, parents.stride(0), rows,
            BLOCK=block, ROUNDS=block.bit_length() - 1, num_warps=1, **pdl_options(parents),
        )  # fmt: skip
        return made

    def accept(self, draft: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """The longest path on which every drafted token is what its parent's row drew.

        Siblings hold different tokens, or the later one is taken.

        Args:
            draft: [B, W - 1] int64.
            drawn: [B, W] int64, y_i ~ p_i at every row.

        Returns:
            path [B, W] int64: the rows of the path from the root, behind its end the row itself;
            new [B] int32: its length. The token committed for row path[i] is drawn[path[i]].
        """
        if not use_triton(draft):
            return accept_path_ref(self, draft, drawn)
        batch, rows = drawn.shape
        path, new = torch.empty_like(self.parents), self.depth.new_empty(batch)
        block = triton.next_power_of_2(rows)
        _accept[(batch,)](
            draft, drawn, self.parents, self.depth, self.bits, path, new,
            draft.stride(0), drawn.stride(0), rows,
            BLOCK=block, num_warps=1 if block <= 16 else 4, **pdl_options(draft),
        )  # fmt: skip
        return path, new


def tree_shape_ref(parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of `Tree.of`. By doubling: after n rounds ancestors up to 2^n steps up are known."""
    batch, rows = parents.shape[0], parents.shape[1] + 1
    place = torch.arange(rows, device=parents.device)
    up = torch.minimum(parents, place[:-1]).clamp_min(0)
    up = torch.cat([parents.new_zeros(batch, 1), up], 1)
    bits, depth = (1 << place).expand(batch, -1), (place > 0).int().expand(batch, -1)
    jump = up
    for _ in range((rows - 1).bit_length()):
        bits, depth = bits | bits.gather(1, jump), depth + depth.gather(1, jump)
        jump = jump.gather(1, jump)
    return up, depth, bits


def accept_path_ref(tree: Tree, draft: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of `Tree.accept`."""
    place = torch.arange(drawn.shape[1], device=draft.device)
    agree = draft == drawn.gather(1, tree.parents[:, 1:])
    failed = (~agree).long() << place[1:]
    # A row stands if padding_slot on the way to it failed.
    stands = tree.bits & failed.sum(1, keepdim=True) == 0
    here = stands.unsqueeze(1) & (tree.depth.unsqueeze(1) == place.unsqueeze(1))  # [B, depth, row]
    path = torch.where(here, place, -1).amax(2)
    new = torch.where(stands, tree.depth, 0).amax(1) + 1
    return torch.where(path < 0, place, path), new.int()


def move_rows_ref(data: Tensor, rows: Tensor, path: Tensor) -> None:
    """The twin of `move_rows`."""
    flat = as_bits(data).flatten(2, 3)
    flat[:, :, rows.flatten()] = flat[:, :, rows.gather(1, path).flatten()]


def move_rows(data: Tensor, rows: Tensor, path: Tensor) -> None:
    """Puts in row i of every request what its row path[i] holds, in every layer of a pool.

    All rows are read before any is written.

    Args:
        data: [2, L, pages, P, Hkv, D], any dtype, contiguous.
        rows: [B, W] int64: pool rows of the requests' rows.
        path: [B, W] int64, of `Tree.accept`.
    """
    if not use_triton(data):
        move_rows_ref(data, rows, path)
        return
    bits = as_bits(data)
    size, layers = bits.shape[4] * bits.shape[5], bits.shape[0] * bits.shape[1]
    block = triton.next_power_of_2(rows.shape[1])
    chunk = min(max(TILE // block, 64), triton.next_power_of_2(size))
    _move_rows[(rows.shape[0], layers, triton.cdiv(size, chunk))](
        bits, rows, path, bits.stride(1), rows.shape[1],
        SIZE=size, BLOCK=block, CHUNK=chunk, num_warps=4,
    )  # fmt: skip


@jit
def _shape(
    parents, up_ptr, depth_ptr, bits_ptr, parents_row, rows,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    drafted = (i > 0) & (i < rows)
    up = tl.load(parents + request * parents_row + i - 1, mask=drafted, other=0)
    up = tl.maximum(tl.minimum(up, (i - 1).to(tl.int64)), 0)
    place = request * rows + i
    tl.store(up_ptr + place, up, mask=i < rows)
    bits, depth, jump = (
        (i * 0 + 1).to(tl.int64) << i.to(tl.int64),
        (i > 0).to(tl.int32),
        up.to(tl.int32),
    )
    for _ in tl.static_range(ROUNDS):
        bits |= tl.gather(bits, jump, 0)
        depth += tl.gather(depth, jump, 0)
        jump = tl.gather(jump, jump, 0)
    tl.store(depth_ptr + place, depth, mask=i < rows)
    tl.store(bits_ptr + place, bits, mask=i < rows)


@jit
def _accept(
    draft_ptr, drawn_ptr, up_ptr, depth_ptr, bits_ptr, path_ptr, new_ptr,
    draft_row, drawn_row, rows, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    place, inside, drafted = request * rows + i, i < rows, (i > 0) & (i < rows)
    draft = tl.load(draft_ptr + request * draft_row + i - 1, mask=drafted, other=-1)
    up = tl.load(up_ptr + place, mask=inside, other=0)
    drawn = tl.load(drawn_ptr + request * drawn_row + up, mask=inside, other=-1)
    one = (i * 0 + 1).to(tl.int64)
    failed = tl.sum(tl.where(drafted & (draft != drawn), one << i.to(tl.int64), 0), 0)
    bits = tl.load(bits_ptr + place, mask=inside, other=0)
    depth = tl.load(depth_ptr + place, mask=inside, other=0)
    stands = inside & ((bits & failed) == 0)
    tl.store(new_ptr + request, tl.max(tl.where(stands, depth, 0), 0) + 1)
    step = tl.where(stands, depth, -1)
    path = tl.max(tl.where(step[None, :] == i[:, None], i[None, :], -1), 1)
    tl.store(path_ptr + place, tl.where(path < 0, i, path).to(tl.int64), mask=inside)


@jit
def _move_rows(
    data, rows_ptr, path_ptr, layer_stride, rows,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program: CHUNK elements of all rows of a request, in one layer of K or V."""
    request, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    path = tl.load(path_ptr + request * rows + i, mask=i < rows, other=0).to(tl.int32)
    moved = (i < rows) & (path != i)
    source = tl.load(rows_ptr + request * rows + path, mask=moved, other=0)
    target = tl.load(rows_ptr + request * rows + i, mask=moved, other=0)
    column = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    both = moved[:, None] & (column < SIZE)[None, :]
    data += layer * layer_stride
    held = tl.load(data + source[:, None] * SIZE + column[None, :], mask=both)
    tl.debug_barrier()  # what one thread writes another may have to read first
    tl.store(data + target[:, None] * SIZE + column[None, :], held, mask=both)
