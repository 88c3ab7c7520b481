"""The base of everything that holds weights: a tree of named parts, without autograd.

Attributes carry Hugging Face's names, so the path of a weight through the tree is its name in a
checkpoint, except for `stored_names`. A private attribute (`_name`) is a reference, not a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor

from forerun.layers.sharding import Shard

T = TypeVar("T", bound="Module")


class Module:
    stored_names: tuple[tuple[str, str], ...] = ()  # (part, name), where checkpoints differ

    def children(self) -> Iterator[tuple[str, Module]]:
        """(name, part), in the order of assignment; parts of a list are `name.0`, `name.1`, ..."""
        stored = dict(self.stored_names)
        for name, value in vars(self).items():
            if name.startswith("_"):
                continue
            if isinstance(value, Module):
                yield stored.get(name, name), value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value))

    def modules(self, kind: type[T]) -> Iterator[T]:
        """All parts of this kind, at any depth."""
        for _, child in self.children():
            if isinstance(child, kind):
                yield child
            yield from child.modules(kind)

    def named_modules(self, kind: type[T], prefix: str = "") -> Iterator[tuple[str, T]]:
        """The same with their paths, which end with a dot."""
        for name, child in self.children():
            if isinstance(child, kind):
                yield f"{prefix}{name}.", child
            yield from child.named_modules(kind, f"{prefix}{name}.")

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """Checkpoint name -> the view it is copied into; fused matrices have a view per part."""
        out: dict[str, Tensor] = {}
        for name, child in self.children():
            out |= child.weights(f"{prefix}{name}.")
        return out

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        """Checkpoint name -> which part of the tensor fills the view; absent: all of it."""
        out: dict[str, Shard] = {}
        for name, child in self.children():
            out |= child.shards(f"{prefix}{name}.")
        return out

    def prepare(self) -> None:
        """Once, after the weights are loaded: packs them and derives what a forward needs."""
        for _, child in self.children():
            child.prepare()
