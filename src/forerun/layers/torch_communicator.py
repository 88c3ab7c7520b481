"""Collectives of torch.distributed: NCCL among GPUs, gloo among processes on CPUs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from forerun.layers.communication import Communicator


@dataclass(frozen=True)
class RankPlace:
    """One of the `size` processes that share a model."""

    rank: int
    size: int
    store: str  # a file, by which they find each other
    timeout: int  # seconds that one waits for the others in an operation


class TorchCommunicator(Communicator):
    """Over the process group of this process."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        """Waits until all ranks have come."""
        self.rank, self.size = place.rank, place.size
        self._on_gpu = device.type == "cuda"
        if sys.platform == "linux":  # one machine: no other interface is needed
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if self._on_gpu else "gloo",
            init_method=f"file://{place.store}",
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=place.timeout),
            device_id=device if self._on_gpu else None,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        if self._on_gpu:
            dist.all_gather_into_tensor(out, x)
        else:
            dist.all_gather(list(out.unbind()), x)
        return out.movedim(0, -2).flatten(-2)

    def close(self) -> None:
        dist.destroy_process_group()
