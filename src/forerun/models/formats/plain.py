"""Plain tensors: one in the files for one of the model, converted or rounded while it is read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.layers.sharding import Shard
from forerun.models.formats.base import Headers, Stored, View, WeightFormat, shapes_in_files


class Plain(WeightFormat):
    """Whatever the checkpoint's format does not read: norms, biases, most embeddings."""

    def reads(self, name: str, headers: Headers) -> bool:
        return True

    def stored(
        self, name: str, view: View, shard: Shard | None, headers: Headers
    ) -> dict[str, Stored]:
        floats = isinstance(view, QuantizedWeight) or view.is_floating_point()
        return {"": Stored(name, shapes_in_files(tuple(view.shape), shard), floats, shard)}

    def decode(self, tensors: Mapping[str, Tensor], shard: Shard | None) -> Tensor:
        return tensors[""]


PLAIN = Plain()
