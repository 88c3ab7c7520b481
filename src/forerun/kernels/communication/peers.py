"""Memory that tensor-parallel ranks write to in each other's GPU, for the kernels of this folder.

The data brings its own flags (NCCL calls such a protocol LL): every 8 bytes that cross NVLink are 4
bytes of data and the number of the call, so there is one crossing, no fence and no flag besides
(`peers_sm90.cuh`).

Two halves of the buffers take turns. A rank writes to one again in the next call but one, after it
has got data of the call between, whose sender had then read everything before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import gpu_of

MAX_TOKENS = 64
MAX_HIDDEN = 8192
ROW_BYTES = 4 * MAX_HIDDEN  # of a token: as many bytes of flags as of data
RANK_BYTES = MAX_TOKENS * ROW_BYTES  # of one rank in another one's buffer


@dataclass(frozen=True)
class PeerBuffers:
    """What the ranks write to each other, and a rank's count of calls."""

    rank: int
    addresses: Tensor  # [ranks] int64, on the device
    state: Tensor  # [2] int32, zeros at first
    seconds: int  # until a rank that waits for another one gives up, which ends its process

    @property
    def ranks(self) -> int:
        return len(self.addresses)


def buffer_bytes(ranks: int) -> int:
    """Bytes of each rank's buffer, zeros at first."""
    return 2 * ranks * RANK_BYTES


def serves(device: torch.device) -> bool:
    """Whether the kernels run on this device."""
    if device.type != "cuda":
        return False
    gpu = gpu_of(device)
    return gpu.capability == 90 and not gpu.amd and nvrtc.available()
