"""The heads: low-rank residual blocks in front of the target's lm_head.

The target's own head predicts 1 position ahead of a hidden state, head i predicts i + 2 ahead.
(Medusa, arXiv 2401.10774, section 2.1, at low rank.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

SHIPPED = Path(__file__).with_name("heads.safetensors")


@dataclass(frozen=True)
class Shape:
    heads: int
    rank: int
    hidden_size: int


def read_shape(path: Path) -> Shape:
    """From the file's header; reads no weights.

    Raises:
        ValueError: the file is missing, or holds something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if set(shapes) != {"down", "up"} or len(shapes["down"]) != 3:
        raise ValueError(f"{path} holds {shapes}, not the heads' down and up")
    heads, rank, hidden = shapes["down"]
    if shapes["up"] != (heads, hidden, rank):
        raise ValueError(f"{path}: up is {shapes['up']}, expected {(heads, hidden, rank)}")
    return Shape(heads, rank, hidden)


class Heads(torch.nn.Module):
    """n heads of rank R on hidden states of size H."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        n, rank, hidden = shape.heads, shape.rank, shape.hidden_size
        self.down = torch.nn.Parameter(torch.randn(n, rank, hidden) * hidden**-0.5)
        self.up = torch.nn.Parameter(torch.zeros(n, hidden, rank))

    @classmethod
    def load(cls, path: Path, device: torch.device, dtype: torch.dtype) -> Heads:
        heads = cls(read_shape(path))
        heads.load_state_dict(load_file(path))
        return heads.requires_grad_(False).to(device, dtype)

    def forward(self, hidden: Tensor, count: int) -> Tensor:
        """[B, H], after the target's final norm -> [B, count, H], the input of lm_head."""
        inner = torch.einsum("bh,nrh->bnr", hidden, self.down[:count])
        outer = torch.einsum("bnr,nhr->bnh", torch.nn.functional.silu(inner), self.up[:count])
        return hidden.unsqueeze(1) + outer
