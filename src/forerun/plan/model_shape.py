"""A model's sizes from its config and, if they are there, the headers of its safetensors.

It is built on the meta device by the code that builds it for real, so sizes cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from forerun.attention.base import LayerMask
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import DenseKV, LatentKV, ModelLayout
from forerun.layers.communication import UnreducedRank, WeightPlacement
from forerun.layers.linear import LinearBase
from forerun.layers.moe import Experts, Router, SparseMoE, check_has_experts
from forerun.layers.sharding import even_shard, kv_head_shard
from forerun.models import further_layers
from forerun.models.checkpoint import Checkpoint
from forerun.models.formats.registry import weight_format
from forerun.models.loader import allocate, check_groups
from forerun.models.registry import model_class
from forerun.plan.work import Gemm, Work, kv_bytes, touched_experts
from forerun.platform.device import DTYPES, resolve_kv_dtype
from forerun.speculative.sharding import divides_by_default

META = torch.device("meta")


@dataclass(frozen=True)
class Matrix:
    """One weight of a decode step, or the stacked ones of a layer's experts."""

    n: int
    k: int
    dtype: torch.dtype
    bits: float  # per value, with scales
    routed: int = 0  # experts that a router chooses from; 0: a dense matrix
    shared: int = 0  # experts that every token goes to
    top_k: int = 0

    def gemm(self, tokens: int, ep: int = 1) -> Gemm:
        """The GEMM of all ranks. With `ep` groups each reads as many experts as the busiest, for
        the others wait; operations are taken as even."""
        if not self.routed:
            return Gemm(self.n, self.k, self.dtype, tokens, bits=self.bits)
        touched = ep * busiest_touched(tokens, self.top_k, self.routed, ep) + self.shared
        choices = tokens * (self.top_k + self.shared)
        return Gemm(self.n, self.k, self.dtype, choices, touched, bits=self.bits)

    @property
    def packed(self) -> bool:
        return self.bits < 8 * self.dtype.itemsize


@lru_cache
def busiest_touched(tokens: int, top_k: int, num_experts: int, groups: int) -> float:
    """The expected number of different experts in the group that has most of them.

    Every set of `top_k` is equally likely; experts are taken to be touched independently.
    """
    if groups == 1:
        return touched_experts(tokens, top_k, num_experts)
    each = num_experts // groups
    touched = touched_experts(tokens, top_k, num_experts) / num_experts
    at_most = expected = 0.0
    for count in range(each):
        at_most += math.comb(each, count) * touched**count * (1 - touched) ** (each - count)
        expected += 1 - at_most**groups  # that some group has more
    return expected


@dataclass(frozen=True)
class ModelShape:
    """What a step of a model reads and computes, and what its weights and K/V take."""

    matrices: tuple[Matrix, ...]
    weight_bytes: int  # in memory
    layout: ModelLayout
    masks: tuple[LayerMask, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None  # None: a latent, which every rank keeps whole
    head_dim: int
    context_length: int

    @classmethod
    def of(
        cls, folder: Path, quantization: str | None = None, kv_cache_dtype: str = "auto"
    ) -> ModelShape:
        """
        Raises:
            ConfigError: the model is not supported, or its files are broken.
        """
        config = load_model_config(folder)
        stored = weight_format(config, quantization)
        dtype = DTYPES.get(config.dtype, torch.bfloat16)
        dtype = torch.bfloat16 if dtype == torch.float16 else dtype
        place = WeightPlacement(dtype, META, quantization=quantization, allocate=False)
        model = model_class(config)(config, place, 1)
        for experts in model.modules(Experts):
            experts.fused = True
        shapes = [(linear, linear.weight.shape) for linear in model.modules(LinearBase)]
        stacks = [
            (moe, (moe.experts.w13.shape, moe.experts.w2.shape)) for moe in model.modules(SparseMoE)
        ]
        checkpoint = _checkpoint(folder, config)
        packed = allocate(model, checkpoint, quantization, stored).values()
        matrices = [_linear(linear, shape, dtype) for linear, shape in shapes]
        matrices += [each for stack in stacks for each in _experts(*stack, dtype)]
        size = sum(weight.nbytes for weight in model.weights().values())
        size += sum(weight.nbytes for weight in packed)
        layout = model.kv_layout(resolve_kv_dtype(kv_cache_dtype, dtype))
        heads = {each.num_kv_heads for each in layout.paged if isinstance(each, DenseKV)}
        return cls(
            matrices=tuple(matrices),
            weight_bytes=size,
            layout=layout,
            masks=tuple(model.layer_masks),
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=min(heads) if heads else None,
            head_dim=config.head_dim,
            context_length=config.max_position,
        )

    @property
    def num_layers(self) -> int:
        return self.layout.num_layers

    @property
    def is_latent(self) -> bool:
        return any(isinstance(layer, LatentKV) for layer in self.layout.layers)

    @property
    def has_experts(self) -> bool:
        return any(matrix.routed for matrix in self.matrices)

    def work(self, batch_size: int, context: int, tokens: int = 1, ep: int = 1) -> Work:
        """The work of a step with `tokens` per request, without drafts; see `Matrix.gemm`."""
        gemms = tuple(matrix.gemm(batch_size * tokens, ep) for matrix in self.matrices)
        return Work(gemms, batch_size * kv_bytes(self.layout, self.masks, context))

    def kv_shards(self, tp: int) -> int:
        """How many parts the K/V of a token is divided into on `tp` ranks."""
        return 1 if self.num_kv_heads is None else min(tp, self.num_kv_heads)

    def divides(self, tp: int) -> bool:
        """Whether `tp` ranks can share its heads."""
        kv = self.num_kv_heads
        return self.num_heads % tp == 0 and (kv is None or kv % tp == 0 or tp % kv == 0)


def check_ranks(folder: Path, quantization: str | None, tp: int, ep: int) -> None:
    """Builds one rank's model, as an engine does at start.

    Raises:
        ConfigError: `tp` ranks in `ep` groups cannot share it.
    """
    config = load_model_config(folder)
    place = WeightPlacement(torch.bfloat16, META, UnreducedRank(0, tp), quantization, ep)
    check_groups(place)
    model = model_class(config)(config, place, 1)
    if ep > 1:
        check_has_experts(model, ep, config.architecture)


@dataclass(frozen=True)
class DraftShape:
    """A draft's share of a step, in bfloat16."""

    weight_bytes: int  # that one pass reads, without the LM head
    num_layers: int
    hidden_size: int
    passes: int = 1  # per step
    ranks: int | None = None  # that share its weights, 1: each has all; None: as an engine does

    @classmethod
    def of(cls, folder: Path, passes: int, ranks: int | None = None) -> DraftShape:
        """Reads the headers of its safetensors; without them, a decoder of the sizes in its config.

        Raises:
            ConfigError: the ranks cannot share its heads.
        """
        config = load_model_config(folder)
        _check_draft_ranks(folder, config, ranks or 1)
        sizes = config.num_layers, config.hidden_size, passes, ranks
        checkpoint = _checkpoint(folder, config)
        if checkpoint is None:
            return cls(2 * _decoder_values(config), *sizes)
        left_out = ("embed_tokens", "lm_head")
        size = sum(
            2 * math.prod(header.shape)
            for name, header in checkpoint.headers.items()
            if not any(part in name for part in left_out)
        )
        return cls(size, *sizes)

    def ranks_of(self, tp: int) -> int:
        """That share its weights, in a deployment on `tp` GPUs."""
        if self.ranks is not None:
            return self.ranks
        return tp if divides_by_default(self.hidden_size) else 1


def _check_draft_ranks(folder: Path, config: ModelConfig, ranks: int) -> None:
    comm = UnreducedRank(0, ranks)
    try:
        even_shard(config.num_heads, comm, "attention heads")
        kv_head_shard(config.num_kv_heads, comm)
    except ConfigError as error:
        where = f"speculative_draft_tp_size {ranks}: the draft {folder}"
        raise ConfigError(f"{where}: {error}") from None


def _decoder_values(config: ModelConfig) -> int:
    hidden, dim = config.hidden_size, config.head_dim
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.num_layers * hidden * (heads * dim + 3 * config.intermediate_size)


def _checkpoint(folder: Path, config: ModelConfig) -> Checkpoint | None:
    if not any(folder.glob("*.safetensors")):
        return None
    checkpoint = Checkpoint(folder, weight_format(config))
    checkpoint.rename(further_layers.prefixes_to_rename(config))
    return checkpoint


def _linear(linear: LinearBase, shape: torch.Size, dtype: torch.dtype) -> Matrix:
    """`shape`: of its weight, before it was quantized."""
    (n, k), packed = shape, linear.quantized
    bits = 8.0 * dtype.itemsize if packed is None else 8 * packed.nbytes / (n * k)
    return Matrix(n, k, dtype, bits)


def _experts(moe: SparseMoE, shapes: Sequence[torch.Size], dtype: torch.dtype) -> Sequence[Matrix]:
    """`shapes`: of the stacked weights, before they were quantized."""
    experts, top_k = moe.experts, moe.gate.routing.top_k
    packed = sum(weight.nbytes for weight in moe.quantized_weights().values())
    values = sum(shape.numel() for shape in shapes)
    bits = 8 * packed / values if packed else 8.0 * dtype.itemsize
    made = [
        Matrix(n, k, dtype, bits, experts.num_experts, experts.num_shared, top_k)
        for _, n, k in shapes
    ]
    return [*made, _router(moe.gate)]


def _router(router: Router) -> Matrix:
    n, k = router.weight.shape
    return Matrix(n, k, router.weight.dtype, 8.0 * router.weight.dtype.itemsize)
