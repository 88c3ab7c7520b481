# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of 65 rows and more on Hopper, in Gluon: who loads and who multiplies are apart.

Of a program's twelve warps four multiply rows 0 to 63 of a tile, four rows 64 to 127, one loads W
and one x (two idle). A ring of chunks lies between them, with two barriers each: `full` when both
operands have arrived, `empty` when both halves are multiplied. W is nobody's result, so its loader
does not wait for the kernel before: a program's ring is full of W when x is ready.

A tile may be 192 columns wide: 128 programs of those cover 24,576 columns, which is gate and up of
Qwen3-8B on 132 processors, and read x a third less often than tiles of 128 do. Its parts of 128 and
64 columns are products of their own. For SiLU · up the rows of W in a tile alternate, 8 of gate and
8 of up: a block of a four-dimensional view of W, and both halves of a pair end in one thread.

Sums are float32 and rounded once. A row's result depends on no other row: missing rows read as
zeros. Gluon is experimental: only the versions in `TESTED` are used.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forerun.kernels.dispatch import Lazy, gluon_jit, tl
from forerun.kernels.pdl import pdl_options

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
else:
    gl = Lazy("triton.experimental.gluon.language")
    hopper = Lazy("triton.experimental.gluon.language.nvidia.hopper")

TESTED = ("3.6.",)  # versions of Triton
BLOCK_M, BLOCK_K = 128, 64
# A thread's registers at the start, then of the second four warps and of the loaders; the first
# four warps take what is left of three times the first number.
REGISTERS, MULTIPLIER, LOADER = 128, 176, 24


@cache
def available() -> bool:
    """Whether this Triton has the Gluon that the kernel is written in."""
    if importlib.util.find_spec("triton") is None:
        return False
    return str(importlib.import_module("triton").__version__).startswith(TESTED)


def launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    best_ids: Tensor | None,
    *,
    block_n: int,
    stages: int,
    programs: int,
    split: int,
    paired: bool,
    partials: bool,
) -> None:
    """x [T, K] times weight [N, K], `split` programs a tile.

    Args:
        out: [T, N] bfloat16, [T, N / 2] where `paired`, `partials` [split, T, N] float32, or with
            `best_ids` each tile's largest, [tiles over N, T] float32.
        best_ids: [tiles over N, T] int32: where these are; or None.
    """
    rows, k = x.shape
    n = weight.shape[0]
    across, down = -(-n // block_n), -(-rows // BLOCK_M)
    assert x.stride(1) == 1 and weight.is_contiguous() and k % (BLOCK_K * split) == 0
    assert split == 1 or partials
    assert not paired or n % 16 == 0
    first = 1 << (block_n.bit_length() - 1)
    rest = block_n - first

    def blocks(width: int) -> Any:
        if not paired:
            return _descriptor(weight, [n, k], [k, 1], [width, BLOCK_K])
        shape, strides = [n // 16, 2, 8, k], [8 * k, n // 2 * k, k, 1]
        return _descriptor(weight, shape, strides, [width // 16, 2, 8, BLOCK_K])

    hopper_kernel[(min(programs, across * down * split),)](
        _descriptor(x, [rows, k], [x.stride(0), 1], [BLOCK_M, BLOCK_K]),
        blocks(first), blocks(rest) if rest else None, out, best_ids,
        rows, n // 2 if paired else n, across * down, down, split, k // BLOCK_K // split,
        BLOCK_M=BLOCK_M, FIRST=first, REST=rest, BLOCK_K=BLOCK_K, STAGES=stages,
        PAIRED=paired, PARTIALS=partials, MULTIPLIER=MULTIPLIER, LOADER=LOADER,
        num_warps=4, maxnreg=REGISTERS, **pdl_options(x),
    )  # fmt: skip


def _descriptor(matrix: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """Of blocks in shared memory as the tensor cores read them; zeros past the end."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(128, 16, len(shape))
    return TensorDescriptor(matrix, shape, strides, block, layout)


@gluon_jit("M", "tiles", "tiles_m", "split", "chunks")
def hopper_kernel(
    x_blocks,  # descriptors of x and of W, a tile's first part and the rest (or None)
    w_blocks,
    w_rest,
    out,  # as in `launch`
    best_ids,
    M,
    N,  # of a row of `out`
    tiles,
    tiles_m,  # a column of tiles' tiles follow one another and share W
    split,
    chunks,  # of one program in one tile
    BLOCK_M: gl.constexpr,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PAIRED: gl.constexpr,
    PARTIALS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    LOADER: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], LAYOUT)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, FIRST, BLOCK_K], LAYOUT)
    rs = ws
    if REST > 0:
        rs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, REST, BLOCK_K], LAYOUT)
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=2)
        hopper.mbarrier.init(empty.index(stage), count=2)
    ring = (xs, ws, rs, full, empty)
    work = (tiles, tiles_m, split, chunks)
    result = (out, best_ids, M, N)
    gl.warp_specialize(
        [
            (_multiply, (ring, work, result, 0, PAIRED, PARTIALS, PDL)),
            (_multiply, (ring, work, result, 1, PAIRED, PARTIALS, PDL)),
            (_load_weight, (w_blocks, w_rest, ring, work, PAIRED)),
            (_load_rows, (x_blocks, ring, work, PDL)),
        ],
        [4, 1, 1],
        [MULTIPLIER, LOADER, LOADER],
    )


@gluon_jit()
def _load_weight(w_blocks, w_rest, ring, work, PAIRED: gl.constexpr):
    _xs, ws, rs, full, empty = ring
    tiles, tiles_m, split, chunks = work
    STAGES: gl.constexpr = ws.shape[0]
    FIRST: gl.constexpr = ws.shape[1]
    BLOCK_K: gl.constexpr = ws.shape[2]
    REST: gl.constexpr = 0 if w_rest is None else rs.shape[1]
    turn = 0
    for unit in range(gl.program_id(0), tiles * split, gl.num_programs(0)):
        n = unit // split // tiles_m * (FIRST + REST)
        begin = unit % split * chunks
        for chunk in range(begin, begin + chunks):
            stage = turn % STAGES
            bar = full.index(stage)
            hopper.mbarrier.wait(empty.index(stage), (turn // STAGES + 1) & 1)
            hopper.mbarrier.expect(bar, (FIRST + REST) * BLOCK_K * 2)
            _copy_weight(w_blocks, ws.index(stage), bar, n, chunk * BLOCK_K, PAIRED)
            if REST > 0:
                _copy_weight(w_rest, rs.index(stage), bar, n + FIRST, chunk * BLOCK_K, PAIRED)
            turn += 1


@gluon_jit()
def _copy_weight(blocks, place, bar, n, k, PAIRED: gl.constexpr):
    if PAIRED:
        pairs: gl.constexpr = blocks.block_shape
        place = place._reinterpret(gl.bfloat16, pairs, blocks.layout)
        hopper.tma.async_copy_global_to_shared(blocks, [n // 16, 0, 0, k], bar, place)
    else:
        hopper.tma.async_copy_global_to_shared(blocks, [n, k], bar, place)


@gluon_jit()
def _load_rows(x_blocks, ring, work, PDL: gl.constexpr):
    xs, _ws, _rs, full, empty = ring
    tiles, tiles_m, split, chunks = work
    STAGES: gl.constexpr = xs.shape[0]
    BLOCK_M: gl.constexpr = xs.shape[1]
    BLOCK_K: gl.constexpr = xs.shape[2]
    if PDL:
        tl.extra.cuda.gdc_wait()
    turn = 0
    for unit in range(gl.program_id(0), tiles * split, gl.num_programs(0)):
        m = unit // split % tiles_m * BLOCK_M
        begin = unit % split * chunks
        for chunk in range(begin, begin + chunks):
            stage = turn % STAGES
            bar = full.index(stage)
            hopper.mbarrier.wait(empty.index(stage), (turn // STAGES + 1) & 1)
            hopper.mbarrier.expect(bar, BLOCK_M * BLOCK_K * 2)
            at = [m, chunk * BLOCK_K]
            hopper.tma.async_copy_global_to_shared(x_blocks, at, bar, xs.index(stage))
            turn += 1


@gluon_jit()
def _multiply(
    ring, work, result,
    HALF: gl.constexpr, PAIRED: gl.constexpr, PARTIALS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Rows `HALF` of every tile."""
    xs, ws, rs, full, empty = ring
    tiles, tiles_m, split, chunks = work
    out, best_ids, M, N = result
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1] // 2
    FIRST: gl.constexpr = ws.shape[1]
    LAST: gl.constexpr = rs.shape[1]
    REST: gl.constexpr = LAST if LAST < FIRST else 0
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 16])
    SUM_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LAST, 16])
    if PDL:
        tl.extra.cuda.gdc_wait()
    turn = 0
    for unit in range(gl.program_id(0), tiles * split, gl.num_programs(0)):
        tile_n = unit // split // tiles_m
        m = unit // split % tiles_m * (2 * ROWS) + HALF * ROWS
        acc = gl.zeros([ROWS, FIRST], gl.float32, SUM)
        rest = gl.zeros([ROWS, LAST], gl.float32, SUM_REST)
        for chunk in range(chunks):
            stage = turn % STAGES
            hopper.mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            x = xs.index(stage).slice(HALF * ROWS, ROWS)
            acc = hopper.warpgroup_mma(x, ws.index(stage).permute((1, 0)), acc, is_async=True)
            # One chunk stays under way; the one before it has been read.
            if REST > 0:
                w = rs.index(stage).permute((1, 0))
                rest = hopper.warpgroup_mma(x, w, rest, is_async=True)
                acc, rest = hopper.warpgroup_mma_wait(2, deps=(acc, rest))
            else:
                acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
            before = empty.index((turn + STAGES - 1) % STAGES)
            hopper.mbarrier.arrive(before, count=1, pred=chunk > 0)
            turn += 1
        if REST > 0:
            acc, rest = hopper.warpgroup_mma_wait(0, deps=(acc, rest))
        else:
            acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        hopper.mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
        n = tile_n * (FIRST + REST)
        if best_ids is not None:
            value, index = _best(acc, n, N)
            if REST > 0:
                other, other_index = _best(rest, n + FIRST, N)
                other = gl.convert_layout(other, value.type.layout)
                other_index = gl.convert_layout(other_index, value.type.layout)
                index = gl.where(other > value, other_index, index)
                value = gl.maximum(value, other)
            row = m + gl.arange(0, ROWS, value.type.layout)
            gl.store(out + tile_n * M + row, value, mask=row < M)
            gl.store(best_ids + tile_n * M + row, index, mask=row < M)
        else:
            place = out
            if PARTIALS:
                place += (unit % split).to(gl.int64) * M * N
            _store(acc, place, m, n, M, N, PAIRED)
            if REST > 0:
                _store(rest, place, m, n + FIRST, M, N, PAIRED)


@gluon_jit()
def _best(acc, n, N):
    """Each row's largest after rounding, and the lowest id of equals."""
    column = n + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    logits = acc.to(gl.bfloat16).to(gl.float32)
    logits = gl.where((column < N)[None, :], logits, float("-inf"))
    value = gl.max(logits, 1)
    return value, gl.min(gl.where(logits == value[:, None], column[None, :], 2**31 - 1), 1)


@gluon_jit()
def _store(acc, out, m, n, M, N, PAIRED: gl.constexpr):
    """acc [ROWS, WIDTH] -> out at rows m and columns n, with PAIRED n / 2."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    if PAIRED:
        pairs = acc.reshape([ROWS, WIDTH // 16, 2, 8]).permute([0, 1, 3, 2])
        gate, up = gl.split(pairs)
        acc = (gate / (1.0 + gl.exp(-gate)) * up).reshape([ROWS, WIDTH // 2])
        n = n // 2
    row = m + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))[:, None]
    column = n + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))[None, :]
    place = out + row.to(gl.int64) * N + column
    gl.store(place, acc.to(out.dtype.element_ty), mask=(row < M) & (column < N))
