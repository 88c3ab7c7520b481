"""Collectives of torch.distributed: NCCL among GPUs, gloo among processes on CPUs."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from forerun.kernels.communication import all_reduce_sm90, exchange_sm90, peers
from forerun.kernels.moe.experts import combine
from forerun.layers.communication import Communicator
from forerun.platform.network import interface_to

log = logging.getLogger("forerun")
HOST = "127.0.0.1"


@dataclass(frozen=True)
class RankPlace:
    """One of the `size` processes that share a model."""

    rank: int
    size: int
    store: tuple[str, int]  # host and port of the `meeting_point` by which they find each other
    timeout: int  # seconds that one waits for the others in an operation
    peer_memory: bool = True  # write to each other's, if that is possible
    fixed_order: bool = False  # sums are in the order of the ranks, of any number of tokens


def meeting_point() -> Any:
    """A store on a free `port`, open as long as this object lives."""
    store = dist.TCPStore  # type: ignore[attr-defined]
    return store(HOST, 0, is_master=True, wait_for_workers=False)


class TorchCommunicator(Communicator):
    """Communicates over the process group of this process."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        """Waits until all ranks have come."""
        self.rank, self.size = place.rank, place.size
        self._fixed_order = place.fixed_order
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            torch.cuda.set_device(device)
        interface = interface_to(place.store)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        timeout = timedelta(seconds=place.timeout)
        store = dist.TCPStore  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if self._on_gpu else "gloo",
            store=store(*place.store, is_master=False, timeout=timeout),
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=device if self._on_gpu else None,
        )

        if place.peer_memory and peers.serves(device):
            self._exchange_buffers(device, place.timeout)

    def _exchange_buffers(self, device: torch.device, timeout: int) -> None:
        """Sets `peers`, if the GPUs can write to each other's memory."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not used
        size, group = peers.buffer_bytes(self.size), dist.group.WORLD
        assert group is not None
        try:
            self._buffer = symm_mem.empty(size, dtype=torch.uint8, device=device)
            self._buffer.zero_()
            self._handle = symm_mem.rendezvous(self._buffer, group)
        except RuntimeError as error:
            log.warning("Sums across ranks go through NCCL: no peer memory (%s).", error)
            return
        addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        state = torch.zeros(2, dtype=torch.int32, device=device)
        self.peers = peers.PeerBuffers(self.rank, addresses, state, timeout)
        torch.cuda.synchronize(device)
        dist.barrier()  # all buffers are zeros

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.peers is not None and all_reduce_sm90.fits(x):
            return all_reduce_sm90.all_reduce(x, self.peers)
        if self._fixed_order:
            return self._sum_in_order(x)
        dist.all_reduce(x)
        return x

    def _sum_in_order(self, x: Tensor) -> Tensor:
        """The sum over ranks as the kernel for few tokens has it: in float32, rounded once."""
        parts = self._gathered(x).view(self.size, -1, x.shape[-1])
        return combine(parts, x.dtype).view(x.shape)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.peers is not None and exchange_sm90.fits_max(x):
            return exchange_sm90.all_reduce_max(x, self.peers)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.peers is not None and exchange_sm90.fits(x):
            return exchange_sm90.all_gather(x, self.peers)
        return self._gathered(x).movedim(0, -2).flatten(-2)

    def _gathered(self, x: Tensor) -> Tensor:
        """Every rank's x, [size, ...]."""
        out = x.new_empty(self.size, *x.shape)
        if self._on_gpu:
            dist.all_gather_into_tensor(out, x)
        else:
            dist.all_gather(list(out.unbind()), x)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous())
        return out

    def close(self) -> None:
        dist.destroy_process_group()
