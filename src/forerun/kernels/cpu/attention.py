"""Attention over paged K/V on a CPU, and QK-norm, RoPE and the K/V write before it.

Reference implementations: the backend `torch_native`, and `qk_norm_rope_write_ref` and
`kv_norm_rope_write_ref` in `kernels/elementwise/qk_norm_rope.py`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.cpu.library import call
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms, RopePositions

MAX_GROUP = 32  # query heads that share a K/V head
MAX_HEAD_DIM = 1024
CAUSAL, BLOCK, SLIDING_BLOCK = 0, 1, 2  # the masks, as in attention.cpp


class _RopeWrite(ctypes.Structure):
    """`RopeWrite` in elementwise.cpp."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "x", "q_norm", "k_norm", "table", "positions", "kv_slots", "q", "k_pool", "v_pool"
            )
        ),
        *(
            (name, c_int64)
            for name in (
                "tokens", "row_stride", "heads", "kv_heads", "layers", "dim", "layer_stride"
            )
        ),
        ("eps", c_float),
        ("wide_positions", c_int32),
        ("bfloat16_x", c_int32),
        ("bfloat16_pool", c_int32),
    )  # fmt: skip


class _Attention(ctypes.Structure):
    """`Attention` in attention.cpp."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "q", "k_pool", "v_pool", "page_table", "start", "first", "tree", "sinks", "out"
            )
        ),
        *(
            (name, c_int64)
            for name in (
                "batch", "q_len", "heads", "kv_heads", "dim", "page_size", "page_stride", "window"
            )
        ),
        ("scale", c_float),
        ("softcap", c_float),
        ("mask", c_int32),
        ("bfloat16_q", c_int32),
        ("bfloat16_pool", c_int32),
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def qk_norm_rope_write(
    qkv: Tensor,
    num_heads: int,
    norms: HeadNorms | None,
    rope: RopePositions,
    kv_slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> Tensor:
    """Normalises and rotates q and k, stores k and v, returns q [T, Hq, D].

    Args: as of the function of this name in `kernels/elementwise/qk_norm_rope.py`; pools are
    float32 or bfloat16.
    """
    dim = k_pool.shape[-1]
    q = qkv.new_empty(qkv.shape[0], num_heads, dim)
    _rope_write(qkv, q, norms, rope, kv_slots, (k_pool, v_pool, 1, 0))
    return q


def kv_norm_rope_write(
    kv: Tensor, norms: HeadNorms | None, rope: RopePositions, kv_slots: Tensor, pool: Tensor
) -> None:
    """The same for keys and values of L layers: kv [T, 2 * L * Hkv * D], all k, then all v.

    pool: [2, L, pages, P, Hkv, D].
    """
    layers = pool.shape[1]
    _rope_write(kv, None, norms, rope, kv_slots, (pool[0, 0], pool[1, 0], layers, pool.stride(1)))


def _rope_write(
    x: Tensor,
    q: Tensor | None,
    norms: HeadNorms | None,
    rope: RopePositions,
    kv_slots: Tensor,
    pools: tuple[Tensor, Tensor, int, int],
) -> None:
    """`pools`: k and v of the first layer, layers, and elements between two layers."""
    k_pool, v_pool, layers, layer_stride = pools
    table, positions = rope.table, rope.positions
    q_norm = None if norms is None or q is None else norms.q
    arguments = _RopeWrite(
        x.data_ptr(), _address(q_norm), None if norms is None else norms.k.data_ptr(),
        table.data_ptr(), positions.data_ptr(), kv_slots.data_ptr(), _address(q),
        k_pool.data_ptr(), v_pool.data_ptr(),
        x.shape[0], x.stride(0), 0 if q is None else q.shape[1], k_pool.shape[-2], layers,
        k_pool.shape[-1], layer_stride,
        0.0 if norms is None else norms.eps, positions.dtype == torch.int64,
        x.dtype == torch.bfloat16, k_pool.dtype == torch.bfloat16,
    )  # fmt: skip
    call("forerun_rope_write", ctypes.addressof(arguments), keep=arguments)


@dataclass(frozen=True)
class QueryTokens:
    """Which query tokens belong to which request."""

    q_len: int = 0  # of every request, if `first` is None; the most of any, with a tree
    first: Tensor | None = None  # [B + 1] int64: each request's first token
    tree: Tensor | None = None  # [B, q_len, words] int64: bit j of token i: it sees token j


@dataclass(frozen=True)
class Scores:
    """What is done to scores, and which are masked; as `AttentionSpec`."""

    scale: float
    mask: int = CAUSAL
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq] float32


def paged_attention(q: Tensor, kv: PagedKV, tokens: QueryTokens, scores: Scores) -> Tensor:
    """q [T, Hq, D] against K/V pages -> [T, Hq, D].

    Masks and windows are those of `LayerMask`; a tree replaces CAUSAL, and has no window.
    """
    q = q.contiguous()
    out = torch.empty_like(q)
    first, tree = tokens.first, tokens.tree
    arguments = _Attention(
        q.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr(), kv.page_table.data_ptr(),
        kv.start.data_ptr(), _address(first), _address(tree), _address(scores.sinks),
        out.data_ptr(),
        kv.start.shape[0], tokens.q_len, q.shape[1], kv.num_kv_heads, q.shape[2], kv.page_size,
        kv.page_table.stride(0), scores.window or 0,
        scores.scale, scores.softcap or 0.0, scores.mask,
        q.dtype == torch.bfloat16, kv.k.dtype == torch.bfloat16,
    )  # fmt: skip
    call("forerun_attention", ctypes.addressof(arguments), keep=arguments)
    return out
