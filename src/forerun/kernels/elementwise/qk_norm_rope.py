# mypy: allow-untyped-defs, allow-incomplete-defs
"""QK-norm, RoPE and the paged K/V write in one kernel, from the output of the QKV GEMM.

The GEMM's output may come as split-K partials, float32 [S, T, N]. Everything between the load and
the store is float32. The same kernel serves one layer's [q heads | k heads | v heads] and the keys
and values of many layers at once, [k of all layers | v of all layers].

Positions and KV slots are read before the kernel waits for its predecessor (pdl.py): a kernel
without programmatic dependent launch must lie between what writes them and this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention.paged_kv import write_kv_ref
from forerun.kernels.elementwise.rms_norm import rms_norm_ref, sum_split_k_ref
from forerun.kernels.runtime.fp8 import FP8, as_bits, encode_e4m3
from forerun.kernels.runtime.gpu import vector_warps
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, triton, use_triton
from forerun.kernels.runtime.pairs import sum_pairs
from forerun.kernels.runtime.pdl import pdl_options

MAX_GROUP = 8  # heads that a CTA takes, at most
FEW_TOKENS, TOKENS_BLOCK = 128, 4  # up to FEW_TOKENS: one token per CTA, else TOKENS_BLOCK


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of every head before RoPE (QK-norm): one weight for all q heads, one for k's."""

    q: Tensor  # [D]; unused without q heads
    k: Tensor  # [D], or [L, D] for L layers
    eps: float


@dataclass(frozen=True)
class RopePositions:
    """The RoPE table, and where T tokens are in it."""

    table: Tensor  # [P, 2, 1, D]: cos and signed sin; its dtype is that of the result
    positions: Tensor  # [T] integers


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of x [T, heads, D], queries and keys together or keys alone -> the same shape.

    `cos_sin`: cos and signed sin, [T, 1, D] each (layers/rope.py).
    """
    cos, sin = cos_sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _rotate_at(x: Tensor, rope: RopePositions) -> Tensor:
    cos, sin = rope.table.index_select(0, rope.positions).to(x.dtype).unbind(1)
    return rotate(x, (cos, sin))


def qk_norm_rope_write_ref(
    qkv: Tensor,
    num_heads: int,
    norms: HeadNorms | None,
    rope: RopePositions,
    kv_slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> Tensor:
    """Reference implementation of `qk_norm_rope_write`."""
    kv_heads, dim = k_pool.shape[-2:]
    whole = sum_split_k_ref(qkv, rope.table.dtype)
    q, k, v = whole.view(len(whole), -1, dim).split([num_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = rms_norm_ref(q, norms.q, norms.eps), rms_norm_ref(k, norms.k, norms.eps)
    write_kv_ref(_rotate_at(k, rope), v, kv_slots, k_pool, v_pool)
    return _rotate_at(q, rope)


def qk_norm_rope_write(
    qkv: Tensor,
    num_heads: int,
    norms: HeadNorms | None,
    rope: RopePositions,
    kv_slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> Tensor:
    """Normalises and rotates q and k, stores k and v, returns q.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D], any row stride, or split-K partials, float32 [S, T, ...].
        num_heads: Hq.
        norms: of q and k heads; None: no QK-norm.
        rope: positions of the tokens.
        kv_slots: [T] int64, where each token's K/V goes in the flattened pool.
        k_pool, v_pool: [pages, P, Hkv, D], any float dtype; float8 is clamped.

    Returns:
        q [T, Hq, D] in the RoPE table's dtype.
    """
    if not use_triton(qkv):
        return qk_norm_rope_write_ref(qkv, num_heads, norms, rope, kv_slots, k_pool, v_pool)
    table = rope.table
    shape = (qkv.shape[-2], num_heads, k_pool.shape[-1])
    q = torch.empty(shape, dtype=table.dtype, device=qkv.device)
    _launch(qkv, q, norms, rope, _KVTarget(kv_slots, k_pool, v_pool))
    return q


def kv_norm_rope_write_ref(
    kv: Tensor,
    norms: HeadNorms | None,
    rope: RopePositions,
    kv_slots: Tensor,
    pool: Tensor,
    num_valid: Tensor | None = None,
) -> None:
    """Reference implementation of `kv_norm_rope_write`; it stores tokens past `num_valid` too."""
    layers, dim = pool.shape[1], pool.shape[-1]
    whole = sum_split_k_ref(kv, rope.table.dtype)
    k, v = (x.reshape(len(whole), layers, -1, dim) for x in whole.chunk(2, -1))
    for layer in range(layers):
        key = k[:, layer]
        if norms is not None:
            key = rms_norm_ref(key, norms.k[layer], norms.eps)
        key = _rotate_at(key, rope)
        write_kv_ref(key, v[:, layer], kv_slots, pool[0, layer], pool[1, layer])


def kv_norm_rope_write(
    kv: Tensor,
    norms: HeadNorms | None,
    rope: RopePositions,
    kv_slots: Tensor,
    pool: Tensor,
    num_valid: Tensor | None = None,
) -> None:
    """Normalises and rotates the keys of L layers, and stores keys and values.

    Args:
        kv: [T, 2 * L * Hkv * D]: keys of all layers, then values; or split-K partials [S, T, ...].
        norms: `k` [L, D]; None: no norm.
        rope, kv_slots: as in `qk_norm_rope_write`.
        pool: [2, L, pages, P, Hkv, D], K and V of all layers.
        num_valid: [B] int32, for T = B * W tokens: of every W tokens only the first so many are
            stored; None: all.
    """
    if not use_triton(kv):
        kv_norm_rope_write_ref(kv, norms, rope, kv_slots, pool, num_valid)
        return
    target = _KVTarget(kv_slots, pool[0], pool[1], pool.shape[1], num_valid)
    _launch(kv, None, norms, rope, target)


@dataclass(frozen=True)
class _KVTarget:
    """Where the kernel stores keys and values."""

    kv_slots: Tensor
    k_pool: Tensor  # [pages, P, Hkv, D], of several layers [L, pages, P, Hkv, D]
    v_pool: Tensor
    num_layers: int = 1
    num_valid: Tensor | None = None


def _launch(
    x: Tensor, q: Tensor | None, norms: HeadNorms | None, rope: RopePositions, target: _KVTarget
) -> None:
    k_pool, layers, num_valid = target.k_pool, target.num_layers, target.num_valid
    kv_heads, dim = k_pool.shape[-2:]
    heads = 0 if q is None else q.shape[1]
    num_tokens = x.shape[-2]
    group = next(g for g in (MAX_GROUP, 4, 2, 1) if heads % g == 0 and kv_heads % g == 0)
    half = triton.next_power_of_2(dim // 2)
    block = 1 if num_tokens <= FEW_TOKENS else TOKENS_BLOCK
    grid = (triton.cdiv(num_tokens, block), (heads + 2 * layers * kv_heads) // group)
    _qk_norm_rope_write[grid](
        x,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        rope.table, rope.positions, target.kv_slots,
        rope.table if q is None else q,  # no q heads: never written
        as_bits(k_pool), as_bits(target.v_pool), num_valid, num_tokens,
        x.stride(0) if x.dim() == 3 else 0,
        x.stride(-2),
        k_pool.stride(0) if layers > 1 else 0,
        1 if num_valid is None else num_tokens // num_valid.shape[0],
        0.0 if norms is None else norms.eps,
        SPLIT_K=x.shape[0] if x.dim() == 3 else 1,
        HEADS=heads, LAYERS=layers, KV_HEADS=kv_heads, DIM=dim, FP8=k_pool.dtype == FP8,
        TOKENS_BLOCK=block, GROUP=group, HALF=half,
        num_warps=max(1, vector_warps(block * group * half, x) // 2), **pdl_options(x),
    )  # fmt: skip


@jit_no_specialize("num_tokens")
def _qk_norm_rope_write(
    x_ptr, q_norm, k_norm, table, positions, kv_slots, q_ptr, k_pool, v_pool, num_valid,
    num_tokens, split_stride, row_stride, layer_stride, tokens_per_request, eps,
    SPLIT_K: tl.constexpr, HEADS: tl.constexpr, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, FP8: tl.constexpr, TOKENS_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per GROUP heads of TOKENS_BLOCK tokens: all of q, or of k or v of one layer.

    Tiles are [TOKENS_BLOCK, GROUP, HALF].
    """
    K_FIRST: tl.constexpr = HEADS
    V_FIRST: tl.constexpr = HEADS + LAYERS * KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0) * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK)[:, None, None]
    first = tl.program_id(1) * GROUP
    inside_batch = token < num_tokens
    i = tl.arange(0, HALF)[None, None, :]
    i_head = tl.arange(0, GROUP)[None, :, None]
    inside_head = i < DIM // 2
    # Positions, KV slots and the table were written before the preceding kernel.
    position = tl.load(positions + token, mask=inside_batch, other=0).to(tl.int64)
    kv_slot = tl.load(kv_slots + token, mask=inside_batch, other=0)
    rope = table + position * (2 * DIM) + i
    cos = tl.load(rope, mask=inside_head, other=0.0).to(tl.float32)
    # The upper half of the table holds the sines without the sign flip.
    sin = tl.load(rope + DIM + DIM // 2, mask=inside_head, other=0.0).to(tl.float32)
    if k_norm is not None:
        layer = tl.minimum(tl.maximum(first - K_FIRST, 0) // KV_HEADS, LAYERS - 1)
        weight = k_norm + layer * DIM
        if HEADS > 0 and first < K_FIRST:
            weight = q_norm
        upper_weight = tl.load(weight + DIM // 2 + i, mask=inside_head, other=0.0).to(tl.float32)
        lower_weight = tl.load(weight + i, mask=inside_head, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    inside = inside_batch & inside_head & (i_head < GROUP)
    if num_valid is not None:
        request = token // tokens_per_request
        valid = tl.load(num_valid + request, mask=inside_batch, other=0)
        inside &= token % tokens_per_request < valid
    lower = i_head * DIM + i  # the lower half; the upper one follows DIM / 2 further
    source = x_ptr + token.to(tl.int64) * row_stride + first * DIM + lower
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, SPLIT_K):
        source += split_stride
        a += tl.load(source, mask=inside, other=0.0)
        b += tl.load(source + DIM // 2, mask=inside, other=0.0)

    if first < V_FIRST:
        if k_norm is not None:
            squares = sum_pairs(tl.fma(a, a, b * b), TOKENS_BLOCK, GROUP, HALF)
            scale = tl.rsqrt(squares / DIM + eps)[:, :, None]
            a *= scale * lower_weight
            b *= scale * upper_weight
        a, b = tl.fma(a, cos, -(b * sin)), tl.fma(b, cos, a * sin)

    if first < K_FIRST:
        target = q_ptr + (token.to(tl.int64) * HEADS + first) * DIM + lower
        tl.store(target, a.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(target + DIM // 2, b.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        # K and V are laid out alike.
        at = kv_slot * (KV_HEADS * DIM) + lower
        if first < V_FIRST:
            k_head = first - K_FIRST
            _store_halves(k_pool, k_head, at, a, b, inside, layer_stride, KV_HEADS, DIM, FP8)
        else:
            v_head = first - V_FIRST
            _store_halves(v_pool, v_head, at, a, b, inside, layer_stride, KV_HEADS, DIM, FP8)


@jit
def _store_halves(
    pool, first, at, a, b, inside, layer_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Stores halves a and b of the heads from `first` on, counted over all layers."""
    pool += (first // KV_HEADS).to(tl.int64) * layer_stride + first % KV_HEADS * DIM
    if FP8:
        a, b = encode_e4m3(a), encode_e4m3(b)
    tl.store(pool + at, a.to(pool.dtype.element_ty), mask=inside)
    tl.store(pool + at + DIM // 2, b.to(pool.dtype.element_ty), mask=inside)
