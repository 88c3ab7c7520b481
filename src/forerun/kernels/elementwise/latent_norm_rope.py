# mypy: allow-untyped-defs, allow-incomplete-defs
"""MLA before attention in one kernel: norm and RoPE of the latent rows, their write, RoPE of q.

A CTA takes the latent row of a token, or the rope part of a group of its heads. Everything between
loads and stores is float32.

Positions and KV slots are read before the kernel waits for its predecessor (pdl.py): a kernel
without programmatic dependent launch must lie between what writes them and this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention.mla_write import write_latent_ref
from forerun.kernels.elementwise.qk_norm_rope import RopePositions, rotate
from forerun.kernels.elementwise.rms_norm import rms_norm_ref
from forerun.kernels.runtime.fp8 import FP8, as_bits, encode_e4m3
from forerun.kernels.runtime.gpu import vector_warps
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

MAX_GROUP = 8  # heads that a CTA takes, at most


@dataclass(frozen=True)
class LatentNorm:
    """RMSNorm of the latent part, before it is stored."""

    weight: Tensor  # [Dl]
    eps: float


def latent_norm_rope_write_ref(
    kv_a: Tensor,
    q_rope: Tensor,
    norm: LatentNorm,
    rope: RopePositions,
    kv_slots: Tensor,
    pool: Tensor,
    q_out: Tensor,
) -> None:
    """Reference implementation of `latent_norm_rope_write`."""
    cos, sin = rope.table.index_select(0, rope.positions).to(kv_a.dtype).unbind(1)
    latent, k_rope = kv_a.split_with_sizes((len(norm.weight), q_rope.shape[-1]), 1)
    k_rope = rotate(k_rope.unsqueeze(1), (cos, sin)).squeeze(1)
    rows = torch.cat((rms_norm_ref(latent, norm.weight, norm.eps), k_rope), 1)
    write_latent_ref(rows, kv_slots, pool)
    q_out.copy_(rotate(q_rope, (cos, sin)))


def latent_norm_rope_write(
    kv_a: Tensor,
    q_rope: Tensor,
    norm: LatentNorm,
    rope: RopePositions,
    kv_slots: Tensor,
    pool: Tensor,
    q_out: Tensor,
) -> None:
    """Stores the latent rows of T tokens and rotates the rope part of their queries.

    Args:
        kv_a: [T, Dl + Dr], tokens at any stride: latent before its norm, rope part before RoPE.
        q_rope: [T, Hq, Dr], tokens and heads at any stride.
        norm: of the latent part.
        rope: positions of the tokens; rope parts are half-split.
        kv_slots: [T] int64, distinct but for the null page.
        pool: [pages, P, Dl + Dr], any float dtype; float8 is clamped.
        q_out: [T, Hq, Dr], any strides, written; may be `q_rope` itself.
    """
    if not use_triton(kv_a):
        latent_norm_rope_write_ref(kv_a, q_rope, norm, rope, kv_slots, pool, q_out)
        return
    num_tokens, heads, rope_dim = q_rope.shape
    latent_dim = kv_a.shape[1] - rope_dim
    group = min(MAX_GROUP, triton.next_power_of_2(heads))
    block = triton.next_power_of_2(latent_dim)
    half = triton.next_power_of_2(rope_dim // 2)
    _latent_norm_rope_write[(num_tokens, 1 + triton.cdiv(heads, group))](
        kv_a, q_rope, norm.weight, rope.table, rope.positions, kv_slots, as_bits(pool), q_out,
        norm.eps, kv_a.stride(0), q_rope.stride(0), q_rope.stride(1),
        q_out.stride(0), q_out.stride(1),
        HEADS=heads, LATENT=latent_dim, ROPE=rope_dim, FP8=pool.dtype == FP8,
        GROUP=group, BLOCK=block, HALF=half,
        num_warps=max(1, vector_warps(max(block, group * half), kv_a)), **pdl_options(kv_a),
    )  # fmt: skip


@jit
def _latent_norm_rope_write(
    kv_ptr, q_ptr, weight_ptr, table, positions, kv_slots, pool, out_ptr,
    eps, kv_stride, q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, FP8: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first CTA of a token takes its latent row, the others GROUP heads each."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = tl.arange(0, HALF)
    inside = i < ROPE // 2
    angle = table + tl.load(positions + token).to(tl.int64) * (2 * ROPE) + i
    cos = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    # The upper half of the table holds the sines without the sign flip.
    sin = tl.load(angle + ROPE + ROPE // 2, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(kv_slots + token)
    d = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + d, mask=(d < LATENT) & (part == 0), other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if part == 0:
        row = kv_ptr + token * kv_stride
        x = tl.load(row + d, mask=d < LATENT, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps) * weight
        a = tl.load(row + LATENT + i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(row + LATENT + ROPE // 2 + i, mask=inside, other=0.0).to(tl.float32)
        target = pool + slot * (LATENT + ROPE)
        _store(target + d, x, d < LATENT, FP8)
        _store(target + LATENT + i, a * cos - b * sin, inside, FP8)
        _store(target + LATENT + ROPE // 2 + i, b * cos + a * sin, inside, FP8)
    else:
        head = ((part - 1) * GROUP + tl.arange(0, GROUP))[:, None]
        i_head, seen = i[None, :], inside[None, :] & (head < HEADS)
        source = q_ptr + token * q_token_stride + head * q_head_stride + i_head
        lower = tl.load(source, mask=seen, other=0.0).to(tl.float32)
        upper = tl.load(source + ROPE // 2, mask=seen, other=0.0).to(tl.float32)
        out = out_ptr + token * out_token_stride + head * out_head_stride + i_head
        _store(out, lower * cos[None, :] - upper * sin[None, :], seen, False)
        _store(out + ROPE // 2, upper * cos[None, :] + lower * sin[None, :], seen, False)


@jit
def _store(pointer, x, mask, FP8: tl.constexpr):
    if FP8:
        x = encode_e4m3(x)
    tl.store(pointer, x.to(pointer.dtype.element_ty), mask=mask)
