"""Linear layers, and how each is split across tensor-parallel ranks.

    Linear         whole on every rank
    ColumnLinear   by output columns (ColumnParallelLinear)
    QKVLinear      by heads (vLLM, SGLang: QKVParallelLinear)
    MergedLinear   by output columns, each part separately (MergedColumnParallelLinear)
    RowLinear      by input columns; outputs are summed across ranks (RowParallelLinear)

Sizes are those of the whole model; each linear keeps what is its rank's. Projections of the same
input are one matrix: a loader fills it part by part, through views.

Some linears return their GEMM before it has run (`PendingGemm`). What reads it, a norm or an
activation, runs it with itself fused in, if the implementation of the GEMM can do that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import accumulate
from operator import itemgetter

import torch
from torch import Tensor

from forerun.kernels.elementwise.gated_act import gelu_tanh_mul
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.layers.communication import SINGLE_RANK, Communicator, WeightPlacement
from forerun.layers.gemm import DRAFT, INT8, Gemm, LibraryGemm, gemm_for
from forerun.layers.module import Module
from forerun.layers.norm import RMSNorm
from forerun.layers.quantize_method import QuantizeMethod
from forerun.layers.sharding import Shard, even_shard, kv_head_shard


class Pending(ABC):
    """The output of a layer, not computed yet. Read once, by one of the methods."""

    @abstractmethod
    def result(self) -> Tensor:
        """[T, out], summed across ranks."""

    @abstractmethod
    def add_rms_norm(
        self, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """Does what `Gemm.add_rms_norm` does; a sum across ranks comes before residual and norm."""


class PendingGemm(Pending):
    """The output of a linear."""

    def __init__(
        self, gemm: Gemm, x: Tensor | DeferredNorm, comm: Communicator = SINGLE_RANK
    ) -> None:
        """`comm`: the ranks whose outputs are summed."""
        self._gemm, self._comm = gemm, comm
        self._x: Tensor | DeferredNorm | None = x

    def result(self) -> Tensor:
        return self._comm.all_reduce(self._gemm(self._take()))

    def add_rms_norm(
        self, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        if self._comm.size > 1:
            return norm.add_across(self._own(norm, residual), residual, self._comm)
        x = self._take()
        assert isinstance(x, Tensor)
        return self._gemm.add_rms_norm(x, residual, norm, reader)

    def _own(self, norm: RMSNorm, residual: Tensor) -> Tensor:
        """[T, out] of this rank, or partials, where one kernel sums these and across ranks."""
        x = self._take()
        if self._comm.peers is None or not norm.fuses_sum(residual, residual):
            return self._gemm(x)
        partials = self._gemm.split_k_partials(x) if isinstance(x, Tensor) else None
        return self._gemm(x) if partials is None else partials

    def split_k_partials(self, free_smem: int = 0) -> Tensor | None:
        """Partials [S, T, out] that a norm is to add up; None: nothing is computed yet.

        `free_smem`: shared memory per SM in bytes to leave to that norm.
        """
        if self._comm.size > 1 or not isinstance(self._x, Tensor):
            return None
        partials = self._gemm.split_k_partials(self._x, free_smem)
        if partials is not None:
            self._x = None
        return partials

    def rows(self, index: Tensor) -> PendingGemm:
        """The same of the tokens at index [n] int64 only."""
        x = self._take()
        assert isinstance(x, Tensor)
        return PendingGemm(self._gemm, x.index_select(0, index), self._comm)

    def silu_and_mul(self) -> Tensor:
        """[gate | up] -> silu(gate) · up, [T, out / 2]."""
        return self._gemm.silu_and_mul(self._take())

    def _take(self) -> Tensor | DeferredNorm:
        """Lets go of the input, which may be the largest activation of a layer."""
        x, self._x = self._x, None
        assert x is not None, "a pending GEMM is read once"
        return x


Rows = Callable[[Tensor], Tensor]  # selects or reorders along dimension 0

# What a layer hands on: a tensor, an output for the next norm to compute, or a norm for the next
# GEMM.
Hidden = Tensor | DeferredNorm | Pending


class LinearBase(Module):
    """`weight` [out, in] and `bias` [out] or None, uninitialised until loaded.

    `quantized` takes the place of `weight`, which is empty then. So it is once `prepare` has
    replaced the plain weight by a packed one.
    """

    shared = False  # the plain weight stays in use elsewhere
    quantizable = True  # whether `quantize` may be called: only GEMMs read the weight

    def __init__(
        self, input_size: int, output_size: int, bias: bool, place: WeightPlacement
    ) -> None:
        self.weight = place.empty_weight(output_size, input_size)
        self.quantized: QuantizedWeight | None = None
        self.quantized_gemm: str | None = None  # what computes with it, once it is prepared
        self.bias = place.empty(output_size) if bias else None
        self.gemm: Gemm = LibraryGemm(self.weight, self.bias)
        self._device, self._quantization = place.device, place.quantization
        self._fixed_order = place.fixed_order
        self._method = QuantizeMethod()  # of the quantized weight

    def allocate(self) -> None:
        """Memory for a plain weight, if there is none yet."""
        if self.weight.device != self._device:
            self.weight = torch.empty_like(self.weight, device=self._device)

    def quantize(self, method: QuantizeMethod) -> bool:
        """Keeps the weight as the method does, before it is loaded; False: it stays plain."""
        n, k = self.weight.shape
        self.quantized, self._method = method.empty_linear(n, k, self._device), method
        if self.quantized is not None:
            self.weight = self.weight.new_empty(0, k, device=self._device)
        return self.quantized is not None

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        plain = {} if self.quantized is not None else {"weight": self.weight}
        kinds = plain if self.bias is None else plain | {"bias": self.bias}
        named = self._rows(prefix).items()
        return {f"{n}{kind}": rows(t) for kind, t in kinds.items() for n, rows in named}

    def quantized_weights(self, prefix: str = "") -> dict[str, QuantizedWeight]:
        """Those that `weights` lacks: a checkpoint fills them in ways of its own."""
        if self.quantized is None:
            return {}
        return {f"{n}weight": self.quantized.map(rows) for n, rows in self._rows(prefix).items()}

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        kinds = ("weight",) if self.bias is None else ("weight", "bias")
        rows = self._row_shards(prefix).items()
        return {f"{name}{kind}": shard for kind in kinds for name, shard in rows}

    def prepare(self) -> None:
        if self.quantized is not None:
            weight, dtype = self.quantized, self.weight.dtype
            kept, fixed = self._method.gemm(weight, self.bias, dtype), self._fixed_order
            if kept is not None and fixed and weight.device.type == "cuda":
                kept = kept.in_fixed_order()
            if kept is None:
                plain = weight.dequantize().to(dtype)
                kept = gemm_for(
                    plain, self.bias, quantization=self._quantization, fixed_order=fixed
                )
            self.gemm = self._with_tokens(kept)
            self.quantized_gemm = self.gemm.describe_quantized() or "dequantized when loaded"
            self.quantized = None
            return
        self.gemm = gemm_for(
            self.weight, self.bias, self.shared, self._quantization, self._fixed_order
        )
        if self.gemm.packs_weight:
            self.weight = self.weight.new_empty(0, self.weight.shape[1])

    def _with_tokens(self, gemm: Gemm) -> Gemm:
        """A GEMM over a quantized weight, with the tokens that the setting `quantization` says."""
        return gemm.with_int8_tokens() if self._quantization in (INT8, DRAFT) else gemm

    def map_rows(self, change: Rows) -> None:
        """Changes rows of the weight in place, before `prepare`: `change` works on [out, ...]."""
        if self.quantized is None:
            change(self.weight)
        else:
            self.quantized.map(change)

    def scale_weight(self, factor: float, rows: slice = slice(None)) -> None:
        """Multiplies rows of the weight, not of the bias, before `prepare`. Exact by 2^n."""
        if self.quantized is None:
            self.weight[rows].mul_(factor)
        else:
            self.quantized.map(itemgetter(rows)).scale_(factor)

    def _rows(self, prefix: str) -> dict[str, Rows]:
        """Path in checkpoints, ending with a dot -> which rows of weight and bias it has."""
        return {prefix: lambda tensor: tensor}

    def _row_shards(self, prefix: str) -> dict[str, Shard]:
        """The same paths -> the rows in the checkpoint, where these are divided among ranks."""
        return {}


class Linear(LinearBase):
    """y = x Wᵀ + b."""

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None = None, quantization: str | None = None
    ) -> Linear:
        """Makes one of an existing matrix [out, in], not prepared."""
        place = WeightPlacement(weight.dtype, weight.device, quantization=quantization)
        linear = cls(0, 0, False, place)
        linear.weight, linear.bias, linear.gemm = weight, bias, LibraryGemm(weight, bias)
        return linear

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self.gemm(x)


class ColumnLinear(Linear):
    """A `Linear` of which every rank has some output columns."""

    def __init__(self, input_size: int, columns: Shard, bias: bool, place: WeightPlacement) -> None:
        super().__init__(input_size, columns.count, bias, place)
        self._columns, self._ranks = columns, place.comm.size

    def _row_shards(self, prefix: str) -> dict[str, Shard]:
        return {prefix: self._columns} if self._ranks > 1 else {}


class MergedBase(LinearBase):
    """Several projections of one input; `parts`: checkpoint name -> output columns, in order."""

    def __init__(
        self,
        input_size: int,
        parts: Mapping[str, int | Shard],
        bias: bool,
        place: WeightPlacement,
    ) -> None:
        """`parts`: a number of columns is divided evenly; a `Shard` says what the rank has."""
        self._shards = {
            name: part if isinstance(part, Shard) else even_shard(part, place.comm, name)
            for name, part in parts.items()
        }
        self.parts = {name: shard.count for name, shard in self._shards.items()}  # of this rank
        self._ranks = place.comm.size
        super().__init__(input_size, sum(self.parts.values()), bias, place)
        self.fused = False  # whether checkpoints have the parts as one matrix, too (Phi-3)

    def scale_part(self, part: str, factor: float) -> None:
        """Multiplies the outputs of one part, before `prepare`. Exact by 2^n."""
        names = list(self.parts)
        first = sum(self.parts[name] for name in names[: names.index(part)])
        rows = slice(first, first + self.parts[part])
        self.scale_weight(factor, rows)
        if self.bias is not None:
            self.bias[rows].mul_(factor)

    def _rows(self, prefix: str) -> dict[str, Rows]:
        """The parts, under their own names next to this module's."""
        if self.fused:
            return super()._rows(prefix)
        above = prefix[: prefix.rfind(".", 0, -1) + 1]
        ends = accumulate(self.parts.values())
        slices = [
            slice(end - size, end) for size, end in zip(self.parts.values(), ends, strict=True)
        ]
        return {
            f"{above}{name}.": itemgetter(rows)
            for name, rows in zip(self.parts, slices, strict=True)
        }

    def _row_shards(self, prefix: str) -> dict[str, Shard]:
        if self._ranks == 1:
            return {}
        if self.fused:
            return {prefix: Shard.joined(*self._shards.values())}
        above = prefix[: prefix.rfind(".", 0, -1) + 1]
        return {f"{above}{name}.": shard for name, shard in self._shards.items()}


class QKVLinear(MergedBase):
    """[q heads | k heads | v heads] of one attention layer."""

    def __init__(
        self,
        input_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        place: WeightPlacement,
    ) -> None:
        self._of_heads(num_heads, num_kv_heads, head_dim, place)
        shards = (each.scaled(head_dim) for each in (self.q_heads, self.kv_heads, self.kv_heads))
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), shards, strict=True))
        super().__init__(input_size, parts, bias, place)

    def _of_heads(
        self, num_heads: int, num_kv_heads: int, head_dim: int, place: WeightPlacement
    ) -> None:
        self.q_heads = even_shard(num_heads, place.comm, "attention heads")
        self.kv_heads = kv_head_shard(num_kv_heads, place.comm)
        self.num_heads, self.num_kv_heads = self.q_heads.count, self.kv_heads.count  # of this rank
        self.head_dim = head_dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads and K/V heads of this rank, and their dim."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    def reorder_heads(self, order: Tensor) -> None:
        """Reorders the dims of every q and k head by `order` [D] (`rotary_order`).

        For `prepare` of an attention, before that of this linear.
        """
        rows = self.parts["q_proj"] + self.parts["k_proj"]

        def reorder(tensor: Tensor) -> Tensor:
            heads = tensor[:rows].unflatten(0, (-1, self.head_dim))
            heads.copy_(heads[:, order.to(tensor.device)])
            return tensor

        if self.bias is not None:
            reorder(self.bias)
        self.map_rows(reorder)

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        """x [T, in] -> [T, (Hq + 2 Hkv) · D]."""
        return self.gemm(x)


class SharedKVLinear(QKVLinear):
    """[q heads | k heads | v heads] where checkpoints have one projection for k and v.

    They are normed differently afterwards, so the GEMM computes it twice.
    """

    def _rows(self, prefix: str) -> dict[str, Rows]:
        return {n: rows for n, rows in super()._rows(prefix).items() if not n.endswith("v_proj.")}

    def prepare(self) -> None:
        size = self.parts["k_proj"]

        def copy_keys(tensor: Tensor) -> Tensor:
            tensor[-size:] = tensor[-2 * size : -size]
            return tensor

        if self.bias is not None:
            copy_keys(self.bias)
        self.map_rows(copy_keys)
        super().prepare()


class GatedQKVLinear(QKVLinear):
    """[q heads | k heads | v heads | a gate per q head]. In checkpoints q_proj has both of a head
    one after the other.
    """

    def __init__(
        self,
        input_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        place: WeightPlacement,
    ) -> None:
        self._of_heads(num_heads, num_kv_heads, head_dim, place)
        q, kv = self.q_heads.scaled(head_dim), self.kv_heads.scaled(head_dim)
        parts = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate": q}
        MergedBase.__init__(self, input_size, parts, bias, place)

    def _rows(self, prefix: str) -> dict[str, Rows]:
        """The view of q_proj is [Hq, 2, D, in]: the first row of a gate is that of its query and
        all rows between q and the gates further.
        """

        def q_and_gate(tensor: Tensor) -> Tensor:
            row, between = tensor.stride(0), len(tensor) - self.parts["gate"]
            shape = (self.num_heads, 2, self.head_dim, *tensor.shape[1:])
            strides = (self.head_dim * row, between * row, *tensor.stride())
            return tensor.as_strided(shape, strides)

        above = prefix[: prefix.rfind(".", 0, -1) + 1]
        parts = {n: rows for n, rows in super()._rows(prefix).items() if n != f"{above}gate."}
        return parts | {f"{above}q_proj.": q_and_gate}

    def _row_shards(self, prefix: str) -> dict[str, Shard]:
        above = prefix[: prefix.rfind(".", 0, -1) + 1]
        parts = {n: s for n, s in super()._row_shards(prefix).items() if n != f"{above}gate."}
        both = {f"{above}q_proj.": self.q_heads.scaled(2 * self.head_dim)}
        return parts | both if parts else {}


class MergedLinear(MergedBase):
    """Projections that an activation joins, such as gate and up."""

    def __call__(self, x: Tensor | DeferredNorm) -> PendingGemm:
        """x [T, in] -> [T, out]."""
        return PendingGemm(self.gemm, x)


class RowLinear(LinearBase):
    """The projection back to the residual stream, which the next norm adds."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool, place: WeightPlacement
    ) -> None:
        self._columns = even_shard(input_size, place.comm, "intermediate size or heads", dim=1)
        super().__init__(self._columns.count, output_size, bias, place)
        self._comm = place.comm

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        return {f"{prefix}weight": self._columns} if self._comm.size > 1 else {}

    def prepare(self) -> None:
        if self.bias is not None and self._comm.rank:
            self.bias.zero_()  # the first rank adds it
        super().prepare()

    def __call__(self, x: Tensor) -> PendingGemm:
        """x [T, in] -> [T, out]."""
        return PendingGemm(self.gemm, x, self._comm)


def silu_and_mul(gate_up: PendingGemm) -> Tensor:
    """SwiGLU (arXiv 2002.05202): [gate | up] [T, 2I] -> silu(gate) · up, [T, I]."""
    return gate_up.silu_and_mul()


def gelu_tanh_and_mul(gate_up: PendingGemm) -> Tensor:
    """GeGLU (arXiv 2002.05202): [gate | up] [T, 2I] -> gelu(gate) · up, [T, I]; tanh form."""
    return gelu_tanh_mul(gate_up.result())
