"""What a decode step cannot do without: bytes to read, products to compute, and the time they take.

The floor is the weights (a head as often as it is read) and the batch's K/V over the read
bandwidth. Left out, and small: norms, biases, embedding rows, activations, what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from forerun.attention.base import LayerMask
from forerun.bench.ceilings import Ceilings, product_seconds
from forerun.engine.engine import Engine
from forerun.kvcache.layouts import ModelLayout, RecurrentState
from forerun.layers.linear import Product


@dataclass(frozen=True)
class Work:
    """One decode step of a batch."""

    products: tuple[Product, ...]
    kv_bytes: int

    @classmethod
    def of(cls, engine: Engine, batch_size: int, context: int) -> Work:
        """As the engine's own model, algorithm and pools have it, at `context` rows a request."""
        step = engine.parts.runner.step
        products = step.model.products(batch_size * step.caps.width)
        cell = kv_bytes(step.attention.pools.layout, step.model.layer_masks, context)
        if step.draft_attention is not None:
            layout = step.draft_attention.pools.layout
            cell += kv_bytes(layout, step.caps.draft_attention, context)
        drafts = step.algorithm.products(batch_size, step.caps.width)
        return cls((*products, *drafts), batch_size * cell)

    @property
    def weight_bytes(self) -> int:
        return sum(product.weight_bytes for product in self.products)

    @property
    def flops(self) -> int:
        return sum(2 * p.n * p.k * p.rows for p in self.products)


def kv_bytes(layout: ModelLayout, masks: Sequence[LayerMask], context: int) -> int:
    """K/V and state that one request reads, all layers; a window hides what lies before it."""
    total = 0
    for layer, mask in zip(layout.layers, masks, strict=True):
        if isinstance(layer, RecurrentState):
            total += layer.state_bytes
        else:
            tokens = context if mask.window is None else min(context, mask.window)
            total += tokens * layer.token_bytes
    return total


@dataclass(frozen=True)
class Bounds:
    """Beside a measured step."""

    weight_bytes: int
    kv_bytes: int
    flops: int
    floor_seconds: float
    gemm_seconds: float  # the products alone, in the vendor's library
    host_gap: float | None = None  # share of the time that the GPU waits between steps

    @classmethod
    def of(cls, work: Work, ceilings: Ceilings, device: torch.device) -> Bounds:
        size = work.weight_bytes + work.kv_bytes
        return cls(
            work.weight_bytes,
            work.kv_bytes,
            work.flops,
            floor_seconds=size / ceilings.read_bytes_per_second,
            gemm_seconds=product_seconds(work.products, device),
        )

    def as_dict(self, step_seconds: float) -> dict[str, Any]:
        return {**asdict(self), "ratio_to_floor": step_seconds / self.floor_seconds}
