"""The ranks of a run: one process, or those that torchrun starts, with FSDP2 over them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from forerun.core.errors import ConfigError
from forerun.platform.device import resolve_device
from forerun_train.drafts.draft import Draft


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether it is the one that writes files and the view."""
        return self.rank == 0

    def rows(self, batch_size: int) -> slice:
        """The sequences of a step that are this rank's."""
        own = batch_size // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, on the device."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def joined(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What all ranks have together, of states that JSON can hold; every rank must ask."""
        if self.size == 1:
            return dict(state)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor([len(text)], device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        most = max(int(each) for each in lengths)
        texts = [text.new_zeros(most) for _ in range(self.size)]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, most - len(text))))
        out: dict[str, Any] = {}
        for each, count in zip(texts, lengths, strict=True):
            _merge(out, json.loads(bytes(each[: int(count)].tolist())))
        return out

    def of_first(self, value: float) -> float:
        """A number of the first rank's; waits."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared.item())


def _merge(into: dict[str, Any], state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


@contextmanager
def joined_ranks(device: str, batch_size: int) -> Iterator[Ranks]:
    """Joins the other processes of the run, if torchrun has started several.

    Raises:
        ConfigError: there is no such device, or the batch cannot be divided.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    where = resolve_device(device)
    if where.type == "cuda":
        where = torch.device("cuda", local)
        torch.cuda.set_device(where)
    if batch_size % size:
        raise ConfigError(
            f"batch_size {batch_size} cannot be divided among {size} processes; make it a multiple."
        )
    if size > 1:
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    try:
        yield Ranks(rank, size, where)
    finally:
        if size > 1:
            dist.destroy_process_group()


def shard(draft: Draft, ranks: Ranks, dtype: torch.dtype) -> None:
    """Divides parameters, gradients and optimizer state among the ranks (FSDP2), in place.

    Each layer is gathered when it runs, in the dtype of the computation.
    """
    if ranks.size == 1:
        return
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in draft.layers():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(draft, mesh=mesh, mp_policy=policy)


def whole(value: Tensor) -> Tensor:
    """All of a tensor that may be divided; every rank must ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def divided_as(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, divided like another one if that is."""
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by name, whole; every rank must ask."""
    return {name: whole(p.detach()) for name, p in model.named_parameters()}
