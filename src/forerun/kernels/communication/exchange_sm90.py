"""Gathers and maxima of a few numbers over peer memory on Hopper (`exchange_sm90.cu`), by NVRTC.

A captured step exchanges some numbers per row when it samples. With NCCL each exchange takes about
10 us, as long as sampling itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels.communication.peers import RANK_BYTES, PeerBuffers
from forerun.kernels.runtime import nvrtc

SOURCE = Path(__file__).with_name("exchange_sm90.cu")
THREADS = 256
MAX_BYTES = 256 << 10  # of a rank; NCCL, which sends no flags, is for more
KINDS = {"GATHER": 0, "MAX_OF_FLOATS": 1, "MAX_OF_INT64": 2}


def fits(x: Tensor) -> bool:
    """Whether the kernel serves x: the same on every rank."""
    kinds = (torch.int32, torch.int64, torch.float32)
    return x.dtype in kinds and 0 < x.numel() * x.element_size() <= MAX_BYTES


def fits_max(x: Tensor) -> bool:
    """The same for `all_reduce_max`."""
    return fits(x) and x.dtype != torch.int32


def all_gather(x: Tensor, peers: PeerBuffers) -> Tensor:
    """x [..., n] of 4 or 8 bytes each, contiguous -> [..., ranks · n], by rank."""
    out = x.new_empty(*x.shape[:-1], peers.ranks * x.shape[-1])
    _launch("GATHER", x, out, peers)
    return out


def all_reduce_max(x: Tensor, peers: PeerBuffers) -> Tensor:
    """The largest of every rank's x, contiguous float32 or int64, per element."""
    out = torch.empty_like(x)
    _launch("MAX_OF_FLOATS" if x.dtype == torch.float32 else "MAX_OF_INT64", x, out, peers)
    return out


def cuda_source(what: str, ranks: int, rank: int) -> str:
    """`exchange_sm90.cu` with its configuration as macros in front, ready to compile.

    `what`: one of `KINDS`.
    """
    sizes = {"THREADS": THREADS, "RANK_BYTES": RANK_BYTES}
    chosen = {"WHAT": KINDS[what], "RANKS": ranks, "RANK": rank}
    return nvrtc.with_macros(SOURCE, KINDS | sizes | chosen)


def _launch(what: str, x: Tensor, out: Tensor, peers: PeerBuffers) -> None:
    word = x.element_size() // 4
    words, row_words = x.numel() * word, x.shape[-1] * word
    kernel = _load_kernel(x.device, what, peers.ranks, peers.rank)
    args = (x, out, peers.addresses, peers.state, words, row_words, peers.seconds)
    nvrtc.launch(kernel, -(-words // (2 * THREADS)), THREADS, args, x.device)


_load_kernel = nvrtc.loader("exchange_sm90_kernel", cuda_source)
