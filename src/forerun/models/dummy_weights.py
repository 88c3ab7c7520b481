"""Random weights in the place of a checkpoint's, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor

from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.layers.communication import SINGLE_RANK, Communicator
from forerun.layers.sharding import Shard
from forerun.models.formats.base import Part, View, WeightFormat, fill, shapes_in_files

DUMMY_FORMATS = ("dummy", "dummy_normal")


def fill_dummy(
    views: Mapping[str, View],
    load_format: str,
    seed: int = 0,
    shards: Mapping[str, Shard] | None = None,
    comm: Communicator = SINGLE_RANK,
    weight_format: WeightFormat | None = None,
) -> None:
    """Random weights from a seed and their names: the same for any number of ranks.

    Experts have other names, and so other weights, where groups of several ranks have them
    (1 < ep_size < tp_size).

    Args:
        load_format: "dummy": everything U(-0.001, 0.001), as SGLang and vLLM fill theirs. Layers
            then add little to the embedding, and the tokens of a block are nearly equal, which a
            GPU at its power limit multiplies faster. "dummy_normal": norms 1, biases 0,
            matrices N(0, 0.02²), like an untrained model; tokens differ as those of text do.
            Quantized weights are the plain ones, rounded.
        weight_format: of weights that cannot be rounded: what is stored of them is random.
    """
    if not views:
        return
    generator = torch.Generator(next(iter(views.values())).device)
    plain_views = [view for view in views.values() if isinstance(view, Tensor)]
    dtype = next(view.dtype for view in plain_views if view.is_floating_point())

    def random(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        generator.manual_seed(crc32(f"{seed} {name}".encode()))
        out = torch.empty(shape, dtype=dtype, device=generator.device)
        _fill_dummy(name, out, load_format, generator)
        return out

    for name, view in views.items():
        shard, shape = (shards or {}).get(name), tuple(view.shape)
        if isinstance(view, QuantizedWeight) and not view.rounds:
            assert weight_format is not None
            own: dict[str, Tensor] = {}
            for key, each in weight_format.stored(name, view, shard, {}).items():
                made = random(each.name, each.shapes[0], dtype if each.floats else torch.uint8)
                own[key] = made if each.shard is None else each.shard.take(made)
            weight_format.load(view, own, Part(shard, comm))
            continue
        if shard is None and isinstance(view, Tensor) and view.is_contiguous():
            generator.manual_seed(crc32(f"{seed} {name}".encode()))
            _fill_dummy(name, view, load_format, generator)
            continue
        shape = shapes_in_files(shape, shard)[0]
        whole = random(name, shape, view.dtype if isinstance(view, Tensor) else dtype)
        part = whole if shard is None else shard.take(whole)
        fill(view, part, Part(shard, comm))


def _fill_dummy(name: str, view: Tensor, load_format: str, generator: torch.Generator) -> None:
    if not view.is_floating_point():  # codes and exponents of MXFP4
        view.random_(112, 124, generator=generator)
    elif load_format == "dummy":
        view.uniform_(-1e-3, 1e-3, generator=generator)
    elif name.endswith("norm.weight"):
        view.fill_(1)
    elif name.endswith("bias"):
        view.zero_()
    else:
        view.normal_(0, 0.02, generator=generator)
