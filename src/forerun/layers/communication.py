"""Where weights live: dtype, device, and the tensor-parallel ranks that share a model.

Reductions across ranks happen in three layers only, all through a `Communicator`: the output of a
row-parallel linear (`layers/linear.py`), of a mixture of experts (`layers/moe.py`) and of the
vocabulary embedding (`layers/embedding.py`). The LM head gathers its logits, or takes the largest
of every rank's best ones. Every rank gets the same bits, so that all of them go on alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.kernels.communication.peers import PeerBuffers


class Communicator(ABC):
    """Collectives among the tensor-parallel ranks of one model."""

    rank: int
    size: int
    peers: PeerBuffers | None = None  # of GPUs that write to each other's memory

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x."""

    @abstractmethod
    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest of every rank's x, per element."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x [..., n], concatenated in the last dimension by rank."""

    @abstractmethod
    def all_to_all(self, x: Tensor) -> Tensor:
        """x [size, ...], a part for each rank -> [size, ...], each rank's part for this one."""


class SingleRank(Communicator):
    """No parallelism: all collectives are the identity."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor) -> Tensor:
        return x


class UnreducedRank(Communicator):
    """A rank of several whose sums stay its own part: another layer reduces them, or, on the meta
    device, nothing is computed.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a maximum over ranks that do not communicate")

    def all_gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError("logits of ranks that do not communicate")

    def all_to_all(self, x: Tensor) -> Tensor:
        raise NotImplementedError("logits of ranks that do not communicate")


SINGLE_RANK = SingleRank()


@dataclass(frozen=True)
class WeightPlacement:
    """What every layer with weights is built with."""

    dtype: torch.dtype
    device: torch.device
    comm: Communicator = SINGLE_RANK
    # Of linears, when they are prepared: "int8", or "draft", which is that where a CPU can.
    quantization: str | None = None
    ep_size: int = 1  # groups of ranks among which experts are divided whole
    # A token's result may depend on its own input alone, not on other tokens: `FixedOrderGemm`.
    fixed_order: bool = False
    allocate: bool = True  # False: linears and experts later, when it is known how they are stored

    def on_meta(self) -> WeightPlacement:
        """The same part of the model without memory; nothing can be computed."""
        comm = UnreducedRank(self.comm.rank, self.comm.size) if self.comm.size > 1 else self.comm
        return replace(self, device=torch.device("meta"), comm=comm)

    def empty(self, *shape: int) -> Tensor:
        """Uninitialised, until a loader fills it."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty_weight(self, *shape: int) -> Tensor:
        """Allocates linears and experts: without `allocate`, no memory until their `allocate`."""
        device = self.device if self.allocate else torch.device("meta")
        return torch.empty(shape, dtype=self.dtype, device=device)
