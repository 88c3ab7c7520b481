"""Which part of a checkpoint's tensor a tensor-parallel rank keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import ConfigError, divisors
from forerun.layers.communication import Communicator

MAX_LISTED = 16  # ranks that errors propose
VOCAB_ALIGNMENT = 8  # of a rank's rows of embedding and LM head: 16 bytes of bfloat16 logits


@dataclass(frozen=True)
class Shard:
    """Ranges of one dimension of a tensor, one after the other."""

    dim: int
    size: int  # of that dimension in the checkpoint
    ranges: tuple[range, ...]

    @property
    def count(self) -> int:
        """What the rank keeps of that dimension."""
        return sum(map(len, self.ranges))

    def take(self, tensor: Any) -> Tensor:
        """This part of a whole tensor, or of a slice of a safetensors file, which reads no more."""
        before = (slice(None),) * self.dim
        parts = [tensor[(*before, slice(each.start, each.stop))] for each in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def shapes_of_whole(self, shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns for those `shapes` that this part may have the shape of the whole tensor."""
        fitting = (s for s in shapes if len(s) > self.dim and s[self.dim] == self.count)
        return [self.shape_of_whole(s) for s in fitting]

    def shape_of_whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, of which a part has this shape."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def along(self, dim: int) -> Shard:
        """The same of another dimension."""
        return replace(self, dim=dim)

    def in_groups(self, size: int, what: str) -> Shard:
        """The same of a tensor that has an entry for `size` neighbours; fewer may be the last.

        Raises:
            ConfigError: neighbours are on two ranks; the message names `what` is divided, and
                numbers of ranks that keep them together.
        """
        for each in self.ranges:
            if each.start % size or (each.stop % size and each.stop != self.size):
                self._refuse_groups(size, what)
        ranges = tuple(range(each.start // size, -(-each.stop // size)) for each in self.ranges)
        return Shard(self.dim, -(-self.size // size), ranges)

    def _refuse_groups(self, size: int, what: str) -> None:
        part = self.size // len(self.ranges)
        fitting = "" if part % size else divisors(part // size, at_most=MAX_LISTED)
        advice = f"take one that does not: {fitting}" if fitting else "drop it"
        raise ConfigError(
            f"tp_size divides {what}, {self.size}, within a group of {size} that is quantized"
            f" together; {advice}."
        )

    def scaled(self, width: int) -> Shard:
        """The same where each of what is counted has `width` neighbouring rows or columns."""
        ranges = tuple(range(each.start * width, each.stop * width) for each in self.ranges)
        return Shard(self.dim, self.size * width, ranges)

    @classmethod
    def whole(cls, size: int, dim: int = 0) -> Shard:
        """All of it, on every rank."""
        return cls(dim, size, (range(size),))

    @classmethod
    def joined(cls, *parts: Shard) -> Shard:
        """Returns the shard of a tensor that has the parts one after the other."""
        ranges: list[range] = []
        size = 0
        for part in parts:
            ranges += [range(size + each.start, size + each.stop) for each in part.ranges]
            size += part.size
        return cls(parts[0].dim, size, tuple(ranges))


def share_of(size: int, comm: Communicator, what: str) -> int:
    """Returns what each rank has of `size`.

    Raises:
        ConfigError: it cannot be divided; the message has the numbers of ranks that it could be.
    """
    if size % comm.size:
        raise ConfigError(
            f"tp_size {comm.size} does not divide the model's {what}, {size}; take one that does:"
            f" {divisors(size, at_most=2 * comm.size)}."
        )
    return size // comm.size


def even_shard(size: int, comm: Communicator, what: str, dim: int = 0) -> Shard:
    """Equal parts, by rank.

    Raises:
        ConfigError: as `share_of`.
    """
    count = share_of(size, comm, what)
    return Shard(dim, size, (range(comm.rank * count, (comm.rank + 1) * count),))


def block_shard(size: int, block: int, comm: Communicator, what: str) -> Shard:
    """Whole blocks of so many, of which the first ranks may have one more; the last may be smaller.

    Raises:
        ConfigError: a rank would have none.
    """
    blocks = -(-size // block)
    if blocks < comm.size:
        raise ConfigError(
            f"tp_size {comm.size} is too many for the model's {what}, {size}: blocks of {block}"
            f" stay on one rank. Take at most {blocks}."
        )
    first, last = (-(-rank * blocks // comm.size) for rank in (comm.rank, comm.rank + 1))
    return Shard(0, size, (range(first * block, min(last * block, size)),))


def kv_head_shard(num_kv_heads: int, comm: Communicator) -> Shard:
    """Divides K/V heads. With more ranks than heads, neighbouring ranks have the same one.

    Raises:
        ConfigError: neither number divides the other.
    """
    if comm.size <= num_kv_heads or comm.size % num_kv_heads:
        return even_shard(num_kv_heads, comm, "K/V heads")
    head = comm.rank * num_kv_heads // comm.size
    return Shard(0, num_kv_heads, (range(head, head + 1),))


@dataclass(frozen=True)
class VocabShard:
    """A rank's token ids, `first` to `first + count`. Every rank has `rows`: the last one pads."""

    vocab_size: int
    first: int
    count: int
    rows: int

    @classmethod
    def of(cls, vocab_size: int, comm: Communicator) -> VocabShard:
        """
        Raises:
            ConfigError: a rank would have no token.
        """
        if comm.size == 1:
            return cls(vocab_size, 0, vocab_size, vocab_size)
        rows = -(-vocab_size // (comm.size * VOCAB_ALIGNMENT)) * VOCAB_ALIGNMENT
        if rows * (comm.size - 1) >= vocab_size:
            raise ConfigError(
                f"tp_size {comm.size} is too many for a vocabulary of {vocab_size}; lower it."
            )
        first = rows * comm.rank
        return cls(vocab_size, first, min(rows, vocab_size - first), rows)

    @property
    def shard(self) -> Shard:
        return Shard(0, self.vocab_size, (range(self.first, self.first + self.count),))

    def own(self, rows: Tensor) -> Tensor:
        """Returns it without the padding, [rows, ...] -> [count, ...]."""
        return rows if self.count == self.rows else rows[: self.count]
