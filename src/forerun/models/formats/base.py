"""A weight format: how checkpoints store quantized weights, and what computes with them.

A format is one class. It says which tensors are its own (`reads`), of which tensors in the files a
weight is made and which part of them a rank reads (`stored`), and what they mean (`decode`). As a
`QuantizeMethod` it says which layers keep the weight packed; the others get it dequantized.
`registry.py` lists the formats, and docs/add-a-quantization-format.md adds one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.layers.communication import SINGLE_RANK, Communicator
from forerun.layers.quantize_method import QuantizeMethod
from forerun.layers.sharding import Shard

View = Tensor | QuantizedWeight  # what a tensor of a checkpoint is copied into
Spec = Mapping[str, Any]  # `quantization_config`, without nulls
COLUMNS = "a matrix's columns"  # in errors

_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True)
class Header:
    """Where one tensor is, its dtype and shape."""

    file: Path
    stored_as: str  # its name in the file
    dtype: str  # safetensors' name: "BF16", "I64", ...
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _SIZES.get(self.dtype, 1)

    @property
    def is_float(self) -> bool:
        """Whether it is of plain floats."""
        return self.dtype in _SIZES


Headers = Mapping[str, Header]


@dataclass(frozen=True)
class Stored:
    """A tensor in the files that a weight is made of."""

    name: str
    shapes: list[tuple[int, ...]]  # that it may have, whole
    floats: bool | None  # whether of plain floats or of integers; None: either
    shard: Shard | None = None  # the part that is read; None: all of it
    as_blocks: bool = False  # of a GGUF file: not dequantized


@dataclass(frozen=True)
class Part:
    """What a rank reads of a weight, and the ranks that read the rest."""

    shard: Shard | None = None  # None: all of it
    comm: Communicator = SINGLE_RANK


WHOLE = Part()


class WeightFormat(QuantizeMethod, ABC):
    """One way to store weights, with the parameters that a config has for it."""

    unused: ClassVar[tuple[str, ...]] = ()  # endings of tensors beside the weights, not read
    keeps_dummy: bool = True  # random weights are packed as the checkpoint's would be

    def check_quantization(self, quantization: str) -> None:
        """
        Raises:
            ConfigError: the setting `quantization` does not apply to a checkpoint of this format.
        """

    @abstractmethod
    def reads(self, name: str, headers: Headers) -> bool:
        """Whether the files have this weight in this format."""

    def method_for(
        self, names: Sequence[str], headers: Headers, shards: Mapping[str, Shard]
    ) -> QuantizeMethod | None:
        """What keeps a matrix of which these are the parts, all of them in this format.

        Args:
            shards: by name, of the tensors of which this rank reads a part.

        Returns:
            None: the matrix is plain.
        """
        return self

    @abstractmethod
    def stored(
        self, name: str, view: View, shard: Shard | None, headers: Headers
    ) -> dict[str, Stored]:
        """The tensors in the files of a weight that it `reads`, each under a key of its own.

        Args:
            name: the plain tensor's, such as "model.layers.0.mlp.down_proj.weight".
            view: of the rank's part, which may have neighbouring dimensions of the weight split.
            shard: the rank's part of the plain weight; None: all of it.

        Raises:
            ConfigError: the part divides what is quantized together.
        """

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], shard: Shard | None) -> View:
        """What they mean: as the layers keep it packed, or plain.

        Args:
            tensors: by the keys of `stored`, of which the parts were read.
        """

    def load(self, view: View, tensors: Mapping[str, Tensor], part: Part = WHOLE) -> None:
        """Fills the view of a part."""
        fill(view, self.decode(tensors, part.shard), part)


def fill(view: View, value: View, part: Part = WHOLE) -> None:
    """Fills a packed or a plain view. A plain value is quantized for a packed one."""
    if not isinstance(view, QuantizedWeight):
        plain = value.dequantize() if isinstance(value, QuantizedWeight) else value
        view.copy_(plain.reshape(view.shape))
    elif isinstance(value, QuantizedWeight):
        view.copy_(value)
    else:
        shard = part.shard
        columns = shard is not None and shard.dim == value.dim() - 1 and shard.count < shard.size
        view.quantize_(value, part.comm.all_reduce_max if columns else None)


def shapes_in_files(shape: tuple[int, ...], shard: Shard | None) -> list[tuple[int, ...]]:
    """The shapes that a plain tensor in a file may have to fill a view of this shape.

    Its own and, from three dimensions on, those with some neighbouring dimensions merged; `shard`:
    the part of the file's tensor that the view is.
    """
    dims = len(shape) if len(shape) > 2 else 0
    runs = [(i, j) for i in range(dims) for j in range(i + 2, dims + 1)]
    merged = [(*shape[:i], math.prod(shape[i:j]), *shape[j:]) for i, j in runs]
    shapes = [shape, *merged]
    return shapes if shard is None else shard.shapes_of_whole(shapes)


def matrix_shapes(view: View, shard: Shard | None) -> list[tuple[int, ...]]:
    """Those of them that have two dimensions: what a view may be as a matrix [N, K]."""
    return [shape for shape in shapes_in_files(tuple(view.shape), shard) if len(shape) == 2]


def compressed_weights(spec: Spec) -> dict[str, Any]:
    """How compressed-tensors quantized all weights; {}: not all in one way, or not by it."""
    groups = spec.get("config_groups") if spec.get("quant_method") == "compressed-tensors" else None
    found = [given(group.get("weights") or {}) for group in (groups or {}).values()]
    return found[0] if found and all(each == found[0] for each in found) else {}


def given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out nulls, which stand for defaults."""
    return {key: value for key, value in raw.items() if value is not None}
