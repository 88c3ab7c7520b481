"""All-reduce of few tokens over peer memory on Hopper (`all_reduce_sm90.cu`), by NVRTC.

A decode step sums a few kilobytes across ranks twice per layer: all of the time is latency. One
kernel adds up this rank's split-K partials, writes the sum to a buffer of every other rank
(`peers.py`), adds what the others have written to its own, and goes on with the residual and the
norm: one crossing of NVLink, no kernel besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels.communication.peers import (
    MAX_HIDDEN,
    MAX_TOKENS,
    RANK_BYTES,
    ROW_BYTES,
    PeerBuffers,
)
from forerun.kernels.runtime import nvrtc

SOURCE = Path(__file__).with_name("all_reduce_sm90.cu")
MAX_PARTS = 16


def fits(x: Tensor) -> bool:
    """Whether `all_reduce` can serve x [T, H], or partials [S, T, H] of bfloat16 results."""
    parts = x.shape[0] if x.dim() == 3 else 1
    tokens, hidden = x.shape[-2:]
    return (
        x.dtype in ((torch.bfloat16, torch.float32) if x.dim() == 3 else (torch.bfloat16,))
        and 0 < tokens <= MAX_TOKENS
        and parts <= MAX_PARTS
        and hidden % 256 == 0
        and hidden <= MAX_HIDDEN
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
    )


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for."""

    hidden: int
    ranks: int
    rank: int
    parts: int
    is_float: bool
    norm: bool


def cuda_source(variant: Variant) -> str:
    """`all_reduce_sm90.cu` with its configuration as macros in front, ready to compile."""
    return nvrtc.with_macros(
        SOURCE,
        {
            "HIDDEN": variant.hidden,
            "RANKS": variant.ranks,
            "RANK": variant.rank,
            "PARTS": variant.parts,
            "PARTS_FLOAT": int(variant.is_float),
            "NORM": int(variant.norm),
            "ROW_BYTES": ROW_BYTES,
            "RANK_BYTES": RANK_BYTES,
        },
    )


def all_reduce(x: Tensor, peers: PeerBuffers) -> Tensor:
    """The sum over all ranks of x [T, H], or of partials [S, T, H]: bfloat16 [T, H]."""
    total = torch.empty(x.shape[-2:], dtype=torch.bfloat16, device=x.device)
    _launch(x, None, None, 0.0, total, None, peers)
    return total


def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: PeerBuffers
) -> tuple[Tensor, Tensor]:
    """(norm, total): total = residual + the sum over all ranks of x, as in `add_rms_norm`."""
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x, residual, weight, eps, total, out, peers)
    return out, total


def all_reduce_add_rms_norm_ref(
    ranks: list[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Computes it from every rank's x; each rank's sum is rounded before it is sent."""
    rounded = [(x if x.dim() == 2 else x.float().sum(0)).to(residual.dtype) for x in ranks]
    total = residual + torch.stack(rounded).float().sum(0).to(residual.dtype)
    normed = torch.nn.functional.rms_norm(total.float(), weight.shape, weight.float(), eps)
    return normed.to(total.dtype), total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    total: Tensor,
    out: Tensor | None,
    peers: PeerBuffers,
) -> None:
    parts = x.shape[0] if x.dim() == 3 else 1
    (tokens, hidden), norm = x.shape[-2:], residual is not None
    is_float = x.dtype == torch.float32
    variant = Variant(hidden, peers.ranks, peers.rank, parts, is_float, norm)
    kernel = _load_kernel(x.device, variant)
    args = (
        x, residual, weight, total, out, peers.addresses, peers.state, tokens, peers.seconds,
        float(eps),
    )  # fmt: skip
    nvrtc.launch(kernel, tokens, hidden // 8, args, x.device)


_load_kernel = nvrtc.loader("all_reduce_sm90_kernel", cuda_source)
