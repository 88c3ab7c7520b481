"""GGUF: a matrix [N, K] is rows of blocks, of which the file's header says the kind.

Every quantized kind is codes, scales and minima of groups of columns (`gguf/blocks.py`). Where our
CPU kernels run they are kept so, embedding and LM head too; elsewhere, and for ranks that read a
part of a matrix, they are dequantized while they are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.gemm.grouped import GroupedKind
from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.layers.gemm_grouped import GroupedMethod
from forerun.layers.quantize_method import QuantizeMethod
from forerun.layers.sharding import Shard
from forerun.models.formats.base import (
    WHOLE,
    Headers,
    Part,
    Stored,
    View,
    WeightFormat,
    matrix_shapes,
)
from forerun.models.formats.plain import PLAIN
from forerun.models.gguf import GGUF
from forerun.models.gguf.blocks import BLOCKS, read_blocks
from forerun.models.gguf.reader import read_gguf
from forerun.models.gguf.weights import kind_of

ROWS = 1024  # that are decoded at once, so that little memory is needed


class GgufFormat(WeightFormat):
    """The quantized tensors of a GGUF file."""

    keeps_dummy = False  # the config does not say their kinds

    def reads(self, name: str, headers: Headers) -> bool:
        return name in headers and kind_of(headers[name]) in BLOCKS

    def method_for(
        self, names: Sequence[str], headers: Headers, shards: Mapping[str, Shard]
    ) -> QuantizeMethod | None:
        if any(name in shards for name in names):
            return None
        kinds = [BLOCKS[kind_of(headers[name])].kept for name in names]
        return GroupedMethod(GroupedKind.of_all(kinds))

    def stored(
        self, name: str, view: View, shard: Shard | None, headers: Headers
    ) -> dict[str, Stored]:
        """The key of blocks is their kind."""
        if not isinstance(view, QuantizedWeight):
            return PLAIN.stored(name, view, shard, headers)
        shapes, kind = matrix_shapes(view, shard), kind_of(headers[name])
        return {kind: Stored(name, shapes, floats=True, as_blocks=True)}

    def decode(self, tensors: Mapping[str, Tensor], shard: Shard | None) -> View:
        ((kind, stored),) = tensors.items()
        return read_blocks(stored, kind) if kind in BLOCKS else stored

    def load(self, view: View, tensors: Mapping[str, Tensor], part: Part = WHOLE) -> None:
        if not isinstance(view, QuantizedWeight):
            return super().load(view, tensors, part)
        ((kind, stored),) = tensors.items()
        for first in range(0, len(stored), ROWS):
            rows = itemgetter(slice(first, first + ROWS))
            view.map(rows).copy_(read_blocks(rows(stored), kind))


def describe_gguf(folder: Path, device: torch.device) -> str:
    """The kinds of a GGUF file's matrices, and what becomes of them on this device."""
    tensors = read_gguf(folder / GGUF).tensors.values()
    kinds = Counter(tensor.kind for tensor in tensors if len(tensor.shape) > 1)
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    if not BLOCKS.keys() & kinds.keys():
        return found
    kept = "kept as stored" if keeps_codes(folder, device) else "dequantized when loaded"
    return f"{found}; what is quantized is {kept} (on {device.type})"


def keeps_codes(folder: Path, device: torch.device) -> bool:
    """Whether weights of this model folder are kept as the file has them."""
    if not (folder / GGUF).exists() or not library.serves(torch.float32, device):
        return False
    return any(tensor.kind in BLOCKS for tensor in read_gguf(folder / GGUF).tensors.values())
