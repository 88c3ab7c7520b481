# mypy: allow-untyped-defs, allow-incomplete-defs
"""From a q, k, v product to attention, in one kernel: head norms, rope, paged K/V write.

The product may come as float32 partial sums [S, T, N]. Everything between the load and the store
is float32. The same kernel serves one layer's [q heads | k heads | v heads] and the keys and
values of many layers at once, [k of all layers | v of all layers].

Positions and rows are read before the kernel waits for its predecessor (pdl.py): a kernel without
programmatic dependence must lie between what writes them and this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention.paged_kv import write_kv_ref
from forerun.kernels.elementwise.rms_norm import rms_norm_ref, sum_split_k_ref, vector_warps
from forerun.kernels.runtime.fp8 import FP8, as_bits, encode_e4m3
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

GROUP = 8  # heads a program takes, at most
FEW, MANY = 128, 4  # up to FEW tokens: one a program, else MANY


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm over every head before the rope: one weight for all q heads, one for k's."""

    q: Tensor  # [D]; unused where there are no q heads
    k: Tensor  # [D], or [L, D] for L layers
    eps: float


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """x [T, heads, D], queries and keys together or keys alone -> the same shape.

    cos and signed sin [T, 1, D] (layers/rope.py).
    """
    cos, sin = cos_sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _rotate_at(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """`rotate` by the rows of a table [P, 2, 1, D]."""
    cos, sin = table.index_select(0, positions).to(x.dtype).unbind(1)
    return rotate(x, (cos, sin))


def qk_norm_rope_write_ref(
    qkv: Tensor,
    heads: int,
    norms: HeadNorms | None,
    table: Tensor,
    positions: Tensor,
    rows: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> Tensor:
    """The twin of `qk_norm_rope_write`."""
    kv_heads, dim = k_pool.shape[-2:]
    whole = sum_split_k_ref(qkv, table.dtype)
    q, k, v = whole.view(len(whole), -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = rms_norm_ref(q, norms.q, norms.eps), rms_norm_ref(k, norms.k, norms.eps)
    write_kv_ref(_rotate_at(k, table, positions), v, rows, k_pool, v_pool)
    return _rotate_at(q, table, positions)


def qk_norm_rope_write(
    qkv: Tensor,
    heads: int,
    norms: HeadNorms | None,
    table: Tensor,
    positions: Tensor,
    rows: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> Tensor:
    """Norms and rotates q and k, stores k and v, returns q.

    Args:
        qkv: [T, (Hq + 2 Hkv) · D], any row stride, or float32 partial sums [S, T, ...].
        heads: Hq.
        norms: of q and k heads, or none.
        table: [P, 2, 1, D] cos and signed sin; its dtype is that of the result.
        positions: [T] integers.
        rows: [T] int64: where every token stands in the flattened pool, page · page size + offset.
        k_pool, v_pool: [pages, page size, Hkv, D], any float dtype; float8 is clamped.

    Returns:
        q [T, Hq, D].
    """
    if not use_triton(qkv):
        return qk_norm_rope_write_ref(qkv, heads, norms, table, positions, rows, k_pool, v_pool)
    q = torch.empty(qkv.shape[-2], heads, k_pool.shape[-1], dtype=table.dtype, device=qkv.device)
    _launch(qkv, q, norms, table, positions, rows, k_pool, v_pool, layers=1, new=None)
    return q


def kv_norm_rope_write_ref(
    kv: Tensor,
    norms: HeadNorms | None,
    table: Tensor,
    positions: Tensor,
    rows: Tensor,
    pool: Tensor,
    new: Tensor | None = None,
) -> None:
    """The twin of `kv_norm_rope_write`, but that rows which are not new may be written too."""
    layers, dim = pool.shape[1], pool.shape[-1]
    whole = sum_split_k_ref(kv, table.dtype)
    k, v = (x.reshape(len(whole), layers, -1, dim) for x in whole.chunk(2, -1))
    for layer in range(layers):
        key = k[:, layer]
        if norms is not None:
            key = rms_norm_ref(key, norms.k[layer], norms.eps)
        key = _rotate_at(key, table, positions)
        write_kv_ref(key, v[:, layer], rows, pool[0, layer], pool[1, layer])


def kv_norm_rope_write(
    kv: Tensor,
    norms: HeadNorms | None,
    table: Tensor,
    positions: Tensor,
    rows: Tensor,
    pool: Tensor,
    new: Tensor | None = None,
) -> None:
    """Norms and rotates the keys of L layers, and stores keys and values.

    Args:
        kv: [T, 2 · L · Hkv · D]: keys of all layers, then values; or partial sums [S, T, ...].
        norms: `k` [L, D]; or none.
        table, positions, rows: as in `qk_norm_rope_write`.
        pool: [2, L, pages, page size, Hkv, D] (`KVPool.data`).
        new: [B] int32 for T = B · W rows: of every W rows only so many are stored, from the
            first; None: all.
    """
    if not use_triton(kv):
        kv_norm_rope_write_ref(kv, norms, table, positions, rows, pool, new)
        return
    _launch(kv, None, norms, table, positions, rows, pool[0], pool[1], pool.shape[1], new)


def _launch(
    x: Tensor,
    q: Tensor | None,
    norms: HeadNorms | None,
    table: Tensor,
    positions: Tensor,
    rows: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    layers: int,
    new: Tensor | None,
) -> None:
    kv_heads, dim = k_pool.shape[-2:]
    heads = 0 if q is None else q.shape[1]
    tokens = x.shape[-2]
    group = next(g for g in (GROUP, 4, 2, 1) if heads % g == 0 and kv_heads % g == 0)
    half = triton.next_power_of_2(dim // 2)
    together = 1 if tokens <= FEW else MANY
    _kernel[(triton.cdiv(tokens, together), (heads + 2 * layers * kv_heads) // group)](
        x,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        table,
        positions,
        rows,
        table if q is None else q,  # no q heads: never written
        as_bits(k_pool),
        as_bits(v_pool),
        new,
        tokens,
        x.stride(0) if x.dim() == 3 else 0,
        x.stride(-2),
        k_pool.stride(0) if layers > 1 else 0,
        1 if new is None else tokens // new.shape[0],
        0.0 if norms is None else norms.eps,
        PARTS=x.shape[0] if x.dim() == 3 else 1,
        HEADS=heads,
        LAYERS=layers,
        KV_HEADS=kv_heads,
        DIM=dim,
        FP8=k_pool.dtype == FP8,
        TOKENS=together,
        GROUP=group,
        HALF=half,
        num_warps=max(1, vector_warps(together * group * half, x) // 2),
        **pdl_options(x),
    )


@jit_no_specialize("tokens")
def _kernel(
    x_ptr, q_norm, k_norm, table, positions, rows, q_ptr, k_pool, v_pool, new,
    tokens, x_part, x_row, layer_stride, width, eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, FP8: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: GROUP heads of TOKENS tokens, all q's, or k's or v's of one layer.

    Tiles are [TOKENS, GROUP, HALF].
    """
    K_FIRST: tl.constexpr = HEADS
    V_FIRST: tl.constexpr = HEADS + LAYERS * KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    first = tl.program_id(1) * GROUP
    there = token < tokens
    i = tl.arange(0, HALF)[None, None, :]
    head = tl.arange(0, GROUP)[None, :, None]
    real = i < DIM // 2
    # Positions, rows and the table are older than the kernel before this one.
    position = tl.load(positions + token, mask=there, other=0).to(tl.int64)
    row = tl.load(rows + token, mask=there, other=0)
    turn = table + position * (2 * DIM) + i
    cos = tl.load(turn, mask=real, other=0.0).to(tl.float32)
    # The upper half of the sines keeps its sign.
    sin = tl.load(turn + DIM + DIM // 2, mask=real, other=0.0).to(tl.float32)
    if k_norm is not None:
        layer = tl.minimum(tl.maximum(first - K_FIRST, 0) // KV_HEADS, LAYERS - 1)
        weight = k_norm + layer * DIM
        if HEADS > 0 and first < K_FIRST:
            weight = q_norm
        upper = tl.load(weight + DIM // 2 + i, mask=real, other=0.0).to(tl.float32)
        under = tl.load(weight + i, mask=real, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    inside = there & real & (head < GROUP)
    if new is not None:
        inside &= token % width < tl.load(new + token // width, mask=there, other=0)
    lower = head * DIM + i  # the half of a head that pairs with the other, DIM / 2 on
    source = x_ptr + token.to(tl.int64) * x_row + first * DIM + lower
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        source += x_part
        a += tl.load(source, mask=inside, other=0.0)
        b += tl.load(source + DIM // 2, mask=inside, other=0.0)

    if first < V_FIRST:
        if k_norm is not None:
            scale = tl.rsqrt(tl.sum(a * a + b * b, 2) / DIM + eps)[:, :, None]
            a *= scale * under
            b *= scale * upper
        a, b = a * cos - b * sin, b * cos + a * sin

    if first < K_FIRST:
        place = q_ptr + (token.to(tl.int64) * HEADS + first) * DIM + lower
        tl.store(place, a.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(place + DIM // 2, b.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        # Page id times page size and offset is the row; k and v are laid out alike.
        at = row * (KV_HEADS * DIM) + lower
        if first < V_FIRST:
            _store(k_pool, first - K_FIRST, at, a, b, inside, layer_stride, KV_HEADS, DIM, FP8)
        else:
            _store(v_pool, first - V_FIRST, at, a, b, inside, layer_stride, KV_HEADS, DIM, FP8)


@jit
def _store(
    pool, first, at, a, b, inside, layer_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Halves a and b of heads from `first` on, counted over all layers."""
    pool += (first // KV_HEADS).to(tl.int64) * layer_stride + first % KV_HEADS * DIM
    if FP8:
        a, b = encode_e4m3(a), encode_e4m3(b)
    tl.store(pool + at, a.to(pool.dtype.element_ty), mask=inside)
    tl.store(pool + at + DIM // 2, b.to(pool.dtype.element_ty), mask=inside)
