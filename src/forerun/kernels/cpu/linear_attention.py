"""Gated DeltaNet on a CPU: convolution, gated delta rule and gated norm, token by token.

A token's result and the state after it have the same bits in decode, in verify passes of any width
and in prompts of any chunks.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from forerun.kernels.cpu.library import call


class Pass(ctypes.Structure):
    """`Pass` in linear_attention.cpp: the requests of a pass, and what is pending for them."""

    _fields_ = (
        ("slots", c_void_p),
        ("num_pending", c_void_p),
        ("num_passes", c_void_p),
        ("chunks", c_void_p),
        ("parents", c_void_p),
        ("batch", c_int64),
        ("q_len", c_int64),
        ("width", c_int64),
    )

    @classmethod
    def of(
        cls,
        pending: tuple[Tensor, Tensor, Tensor | None],
        num_tokens: int,
        width: int,
        chunks: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Pass:
        """Makes it for `num_tokens` tokens: of prompts, or as many for every request.

        Args:
            pending: slots [B] int64; num_pending [S] int32; num_passes [S] int32, if that is read.
            width: tokens whose updates a slot keeps.
            chunks: [B, 2] int32, first token and number of tokens of each prompt.
            parents: [B, q_len] int64, of trees: earlier tokens, -1 for the root.
        """
        slots, counts, passes = pending
        at = (None if x is None else x.data_ptr() for x in (slots, counts, passes, chunks, parents))
        made = cls(*at, len(slots), num_tokens // len(slots), width)
        made.keep = pending, chunks, parents
        return made


class _Conv(ctypes.Structure):
    """`Conv` in linear_attention.cpp."""

    _fields_ = (
        ("requests", Pass),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("state", c_void_p),
        ("inputs", c_void_p),
        ("out", c_void_p),
        ("row_stride", c_int64),
        ("channels", c_int64),
        ("size", c_int64),
        ("bfloat16", c_int32),
    )


class _Delta(ctypes.Structure):
    """`Delta` in linear_attention.cpp."""

    _fields_ = (
        ("requests", Pass),
        ("qkv", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("decay", c_void_p),
        ("dt_bias", c_void_p),
        ("state", c_void_p),
        ("k", c_void_p),
        ("delta", c_void_p),
        ("g", c_void_p),
        ("out", c_void_p),
        ("a_stride", c_int64),
        ("b_stride", c_int64),
        ("k_heads", c_int64),
        ("v_heads", c_int64),
        ("k_dim", c_int64),
        ("v_dim", c_int64),
        ("bfloat16", c_int32),
    )


def causal_conv(x: Tensor, weight: Tensor, requests: Pass, state: Tensor, inputs: Tensor) -> Tensor:
    """silu of the convolution, x [T, C] of any row stride -> [T, C].

    Args:
        weight: [C, K], contiguous.
        state: [S, K - 1, C], updated in place.
        inputs: [S, W, C], written by decode and verify passes.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    channels, size = weight.shape
    arguments = _Conv(
        requests, x.data_ptr(), weight.data_ptr(), state.data_ptr(), inputs.data_ptr(),
        out.data_ptr(), x.stride(0), channels, size, x.dtype == torch.bfloat16,
    )  # fmt: skip
    call("forerun_causal_conv", ctypes.addressof(arguments), keep=(arguments, requests, x))
    return out


def gated_delta(
    qkv: Tensor,
    gates: tuple[Tensor, Tensor, Tensor, Tensor],
    requests: Pass,
    state: Tensor,
    updates: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """The gated delta rule, qkv [T, 2 HK Dk + HV Dv], contiguous -> [T, HV, Dv].

    Args:
        gates: a and b [T, HV] of qkv's dtype and any row stride; decay and dt_bias [HV] float32.
        state: [S, HV, Dk, Dv] float32, updated in place.
        updates: k [S, W, 2, HK, Dk], delta [S, W, HV, Dv], g [S, W, 2, HV], float32; of the last
            decode or verify pass, and written by such a pass.
    """
    v_heads, v_dim = state.shape[1], state.shape[3]
    out = torch.empty(len(qkv), v_heads, v_dim, dtype=qkv.dtype)
    a, b, decay, dt_bias = gates
    arguments = _Delta(
        requests, qkv.data_ptr(), a.data_ptr(), b.data_ptr(), decay.data_ptr(),
        dt_bias.data_ptr(), *_states(state, updates), out.data_ptr(), a.stride(0), b.stride(0),
        *_sizes(state, updates), qkv.dtype == torch.bfloat16,
    )  # fmt: skip
    call("forerun_gated_delta", ctypes.addressof(arguments), keep=(arguments, requests, qkv, gates))
    return out


def replay_delta(
    requests: Pass,
    state: Tensor,
    updates: tuple[Tensor, Tensor, Tensor],
    counts: Tensor,
    rows: Tensor,
    snapshots: Tensor,
) -> None:
    """Writes the states after `counts` [B] int32 updates to `rows` [B] int64 of snapshots.

    State and updates are those of `gated_delta`; snapshots [N, HV, Dk, Dv] float32. Of 0 updates,
    a row stays as it is.
    """
    arguments = _Delta(requests)
    arguments.state, arguments.k, arguments.delta, arguments.g = _states(state, updates)
    names = "k_heads", "v_heads", "k_dim", "v_dim"
    for name, size in zip(names, _sizes(state, updates), strict=True):
        setattr(arguments, name, size)
    call(
        "forerun_replay_delta", ctypes.addressof(arguments), counts.data_ptr(), rows.data_ptr(),
        snapshots.data_ptr(), keep=arguments,
    )  # fmt: skip


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x / rms(x) · silu(z): x [T, H, D], z [T, H · D] of any row stride -> [T, H · D]."""
    tokens, heads, dim = x.shape
    out = torch.empty(tokens, heads * dim, dtype=x.dtype)
    sizes = (c_int64 * 4)(tokens, heads, dim, z.stride(0))
    call(
        "forerun_gated_norm", x.data_ptr(), z.data_ptr(), weight.data_ptr(),
        ctypes.addressof(sizes), eps, out.data_ptr(), x.dtype == torch.bfloat16,
        keep=(sizes, x, z),
    )  # fmt: skip
    return out


def _states(state: Tensor, updates: tuple[Tensor, Tensor, Tensor]) -> list[int]:
    return [each.data_ptr() for each in (state, *updates)]


def _sizes(state: Tensor, updates: tuple[Tensor, Tensor, Tensor]) -> tuple[int, int, int, int]:
    """(HK, HV, Dk, Dv)."""
    _, v_heads, k_dim, v_dim = state.shape
    return updates[0].shape[3], v_heads, k_dim, v_dim
