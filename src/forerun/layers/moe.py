"""Sparse mixture of experts (arXiv 2101.03961): a router sends each token to k of E gated MLPs.

Names are those of Hugging Face: `gate.weight`, `experts.3.up_proj.weight`. The experts' matrices
are stored stacked, and a loader fills them through views, whether a checkpoint has one tensor per
expert and projection (as on the Hub) or all experts in one (as transformers 5 holds them).

Experts that compute every token (DeepSeek's shared experts) are stacked after the routed ones. In a
checkpoint they are one MLP as wide as all of them, `shared_experts.up_proj.weight`. In a decode
step they are further choices of every token (SGLang: shared experts fusion): no kernels of their
own, and their weights are read in one stream with the others. For more tokens dense GEMMs compute
them, but in a fixed order, where a token's sum must not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import itemgetter
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import ConfigError, divisors
from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.kernels.moe.align import of_experts
from forerun.kernels.moe.config import (
    MAX_DECODE_TOKENS,
    experts_need_blocks,
    packs_in_fixed_order,
)
from forerun.kernels.moe.experts import ExpertActivation, combine, expert_partials
from forerun.kernels.moe.gated_output import GatedOutput
from forerun.kernels.moe.router import new_counts, route
from forerun.kernels.moe.router_logits_sm90 import (
    NORM_SMEM_BYTES,
    LogitsRouter,
    add_rms_norm_router_logits_sm90,
    choose_logits_sm90,
    norm_fits,
    router_logits_sm90,
)
from forerun.kernels.moe.routing import Routed, RouterLogits, Routing, route_ref
from forerun.kernels.runtime.gpu import gpu_of
from forerun.layers.communication import Communicator, UnreducedRank, WeightPlacement
from forerun.layers.experts_cpu import cpu_experts_serve, pack_cpu_experts
from forerun.layers.gemm import Gemm, plain_gemm_for
from forerun.layers.linear import Hidden, Pending, PendingGemm, Rows
from forerun.layers.mlp import GatedMLP
from forerun.layers.module import Module
from forerun.layers.norm import RMSNorm
from forerun.layers.quantize_method import PackedExperts, QuantizeMethod
from forerun.layers.residual import AddRMSNorm
from forerun.layers.sharding import Shard, block_shard, even_shard

__all__ = [
    "Experts",
    "PendingExperts",
    "Router",
    "Routing",
    "SharedExpertMoE",
    "SparseMoE",
    "by_blocks",
    "choose_expert_layout",
    "other_ranks_experts",
]

ALIGNMENT = 8  # of hidden size and expert width: 16 bytes of bfloat16


class Router(Module):
    """`weight` [E, H] and, for some models, `e_score_correction_bias` [E] float32."""

    has_bias: ClassVar[bool] = False  # of the logits

    def __init__(self, hidden_size: int, routing: Routing, place: WeightPlacement) -> None:
        self.routing = replace(routing, fixed_order=place.fixed_order)
        self.bias = place.empty(routing.num_experts) if self.has_bias else None
        self.weight = place.empty(routing.num_experts, hidden_size)
        # Rounded to bfloat16, it would change which experts are chosen.
        self.e_score_correction_bias = (
            torch.empty(routing.num_experts, dtype=torch.float32, device=place.device)
            if routing.correction_bias
            else None
        )
        self._counts = torch.empty(0)
        self._packed: cpu.PackedWeight | None = None  # of our kernels for CPUs

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        out = {f"{prefix}weight": self.weight}
        if self.bias is not None:
            out[f"{prefix}bias"] = self.bias
        if self.e_score_correction_bias is not None:
            out[f"{prefix}e_score_correction_bias"] = self.e_score_correction_bias
        return out

    def prepare(self) -> None:
        self._counts = new_counts(self.routing, self.weight.device)
        if cpu_experts_serve(self.weight):
            exact = self.routing.float32_logits
            self._packed = cpu.pack(self.weight.float() if exact else self.weight, self.bias)

    def __call__(self, x: Tensor) -> Routed:
        """x [T, H] -> experts and weights of T tokens."""
        correction = self.e_score_correction_bias
        if self._packed is not None:
            logits = cpu.gemm(x.to(self._packed.dtype), self._packed)
            return route_ref(logits, correction, self.routing, self.routing.num_shared)
        return route(x, self.weight, correction, self.routing, self._counts, self.bias)

    def logits_for_experts(self, x: Tensor, width: int) -> RouterLogits | None:
        """Logits of few tokens x [T, H], where experts of this width choose by themselves."""
        router = self._logits_router(x, width)
        return None if router is None else router_logits_sm90(x, router)

    def add_norm_logits(
        self, x: PendingGemm, residual: Tensor, norm: RMSNorm, width: int
    ) -> tuple[Tensor, Tensor, RouterLogits] | None:
        """`norm.add(x, residual)` and the logits in one kernel; None: nothing is computed yet."""
        router = self._logits_router(residual, width)
        plain = type(norm) is RMSNorm and norm.weight.dtype == residual.dtype
        if router is None or not plain or not norm_fits(*residual.shape):
            return None
        parts = x.split_k_partials(NORM_SMEM_BYTES)
        if parts is None:
            return None
        return add_rms_norm_router_logits_sm90(parts, residual, (norm.weight, norm.eps), router)

    def _logits_router(self, x: Tensor, width: int) -> LogitsRouter | None:
        if not x.is_cuda or self.bias is not None:
            return None
        (tokens, hidden), gpu = x.shape, gpu_of(x.device)
        config = choose_logits_sm90(tokens, hidden, width, self.routing, x.dtype, gpu)
        if config is None:
            return None
        correction = self.e_score_correction_bias
        return LogitsRouter(self.weight, correction, self.routing, self._counts, config)


class Experts(Module):
    """E routed and n shared gated MLPs: `w13` [E + n, 2I, H], gate rows before up rows, and `w2`
    [E + n, H, I]. Quantized weights take their place, which are empty then.

    With expert parallelism, E are those of the rank's group (in SGLang: ep_size groups), and none
    are shared.
    """

    activation: ExpertActivation = None
    block: ClassVar[int | None] = None  # columns that stay on one rank; None: ranks have as many

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        place: WeightPlacement,
        num_shared: int = 0,
    ) -> None:
        """`num_experts`: the routed ones, of all ranks.

        Raises:
            ConfigError: the ranks cannot share them.
        """
        self._ranks = place.comm.size
        self.part = self._part(num_experts, place)  # ids of the routed experts on this rank
        group = place.comm.size // place.ep_size  # of ranks that share these
        within = UnreducedRank(place.comm.rank % group, group)
        self._columns = (
            even_shard(intermediate_size, within, "expert width")
            if self.block is None
            else block_shard(intermediate_size, self.block, within, "expert width")
        )
        self.width = self._columns.count  # of this rank
        for name, size in (("hidden_size", hidden_size), ("expert width", self.width)):
            if size < ALIGNMENT or size % ALIGNMENT:
                raise ConfigError(
                    f"A mixture of experts with {name} {size}{self._per_rank()} is not supported:"
                    f" the kernels need multiples of {ALIGNMENT}."
                )
        self.num_experts, self.num_shared = len(self.part), num_shared
        self._num_all, self._hidden_size = num_experts, hidden_size
        self.is_part = self.num_experts < num_experts
        count = self.num_experts + num_shared
        self.w13 = place.empty_weight(count, 2 * self.width, hidden_size)
        self.w2 = place.empty_weight(count, hidden_size, self.width)
        self.device = place.device
        self.fused = False  # whether the checkpoint has all routed experts in one tensor
        self.projections = "gate_proj", "up_proj", "down_proj"  # their names in checkpoints
        self.quantized_gemm: str | None = None  # what computes with quantized weights
        self._method = QuantizeMethod()  # of quantized weights
        # In place of w13 and w2: until they are prepared, and as a kernel reads them then.
        self._quantized: tuple[QuantizedWeight, ...] = ()
        self._packed: PackedExperts | None = None
        self._shared_gate_up: list[Gemm] = []
        self._fixed_order = place.fixed_order
        self.in_blocks = False  # in a fixed order: see `by_blocks`

    def _part(self, num_experts: int, place: WeightPlacement) -> range:
        ep_size = place.ep_size
        if ep_size == 1:
            return range(num_experts)
        if num_experts % ep_size:
            raise ConfigError(
                f"ep_size {ep_size} does not divide the model's {num_experts} experts; take"
                f" {divisors(place.comm.size, num_experts)}."
            )
        each = num_experts // ep_size
        first = place.comm.rank * ep_size // place.comm.size * each
        return range(first, first + each)

    @property
    def can_be_fused(self) -> bool:
        """Whether this rank's part of all experts in one tensor is a range of one dimension."""
        return not self.is_part or self._columns.count == self._columns.size

    def set_fused(self, fused: bool) -> None:
        """
        Raises:
            ConfigError: they are, but cannot be read so.
        """
        if fused and not self.can_be_fused:
            raise ConfigError(
                "This checkpoint has all experts in one tensor, of which a rank reads whole experts"
                " or columns, not both; set ep_size to 1 or tp_size."
            )
        self.fused = fused

    def other_ranks(self, prefix: str) -> set[str]:
        """Paths of matrices that only other ranks read."""
        if self.fused or not self.is_part:
            return set()
        count = self._num_all
        others = (i for i in range(count) if i not in self.part)
        return {f"{prefix}{i}.{name}" for i in others for name in self.projections}

    def _per_rank(self) -> str:
        return f" on each of tp_size {self._ranks} ranks" if self._ranks > 1 else ""

    def allocate(self) -> None:
        """Memory for the weights, if there is none yet."""
        if self.w13.device != self.device:
            self.w13 = torch.empty_like(self.w13, device=self.device)
            self.w2 = torch.empty_like(self.w2, device=self.device)

    def quantize(self, method: QuantizeMethod) -> bool:
        """Keeps the weights as the method does, before they are loaded; False: they stay plain."""
        self._quantized, self._method = method.empty_experts(self) or (), method
        if self._quantized:
            self.w13, self.w2 = (w.new_empty(0, device=self.device) for w in (self.w13, self.w2))
        return bool(self._quantized)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """Weights of the routed experts."""
        return self._plain(self._routed(prefix))

    def _plain(self, views: dict[str, tuple[int, Rows]]) -> dict[str, Tensor]:
        weights = self.w13, self.w2
        named = {} if self._quantized else views
        return {name: rows(weights[i]) for name, (i, rows) in named.items()}

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        """Every rank has some columns of each of its experts."""
        if self._ranks == 1:
            return {}
        if self.fused and self.is_part:
            whole = Shard(0, self._num_all, (self.part,))
            return {f"{prefix}gate_up_proj": whole, f"{prefix}down_proj": whole}
        own, columns = self._columns, replace(self._columns, dim=1)
        if self.fused:
            gate_up = replace(Shard.joined(own, own), dim=1)
            down = replace(self._columns, dim=2)
            return {f"{prefix}gate_up_proj": gate_up, f"{prefix}down_proj": down}
        parts = dict(zip(self.projections, (own, own, columns), strict=True))
        return {
            f"{prefix}{i}.{name}.weight": shard for i in self.part for name, shard in parts.items()
        }

    def shared_shards(self, prefix: str = "") -> dict[str, Shard]:
        if self._ranks == 1 or not self.num_shared:
            return {}
        rows = Shard.joined(*[self._columns] * self.num_shared)
        parts = {"gate_proj": rows, "up_proj": rows, "down_proj": replace(rows, dim=1)}
        return {f"{prefix}{name}.weight": shard for name, shard in parts.items()}

    def shared_weights(self, prefix: str = "") -> dict[str, Tensor]:
        """Weights of the shared experts as one MLP: gate and up [n, I, H], down [H, n, I]."""
        return self._plain(self._shared_mlp(prefix))

    def quantized_weights(self, prefix: str, shared_prefix: str) -> dict[str, QuantizedWeight]:
        """Both kinds, if they are quantized."""
        if not self._quantized:
            return {}
        views = self._routed(prefix) | self._shared_mlp(shared_prefix)
        return {name: self._quantized[i].map(rows) for name, (i, rows) in views.items()}

    def matrix_names(self, prefix: str, shared_prefix: str) -> list[str]:
        """Names of both kinds, quantized or not."""
        return [*self._routed(prefix), *self._shared_mlp(shared_prefix)]

    def _routed(self, prefix: str) -> dict[str, tuple[int, Rows]]:
        """Name in checkpoints -> which matrices it has, of w13 (0) or w2 (1)."""
        if self.fused:
            routed = itemgetter(slice(self.num_experts))
            return {f"{prefix}gate_up_proj": (0, routed), f"{prefix}down_proj": (1, routed)}
        gate, up = slice(self.width), slice(self.width, None)
        out: dict[str, tuple[int, Rows]] = {}
        for i, number in enumerate(self.part):
            views = (0, itemgetter((i, gate))), (0, itemgetter((i, up))), (1, itemgetter(i))
            names = (f"{prefix}{number}.{name}.weight" for name in self.projections)
            out |= dict(zip(names, views, strict=True))
        return out

    def _shared_mlp(self, prefix: str) -> dict[str, tuple[int, Rows]]:
        """The same of the shared experts."""
        if not self.num_shared:
            return {}
        shared = slice(self.num_experts, None)
        return {
            f"{prefix}gate_proj.weight": (0, itemgetter((shared, slice(self.width)))),
            f"{prefix}up_proj.weight": (0, itemgetter((shared, slice(self.width, None)))),
            f"{prefix}down_proj.weight": (1, lambda w2: w2[shared].transpose(0, 1)),
        }

    def prepare(self) -> None:
        """Quantized weights that no kernel reads are dequantized."""
        if self._quantized:
            (w13, w2), dtype = self._quantized, self.w13.dtype
            self._quantized = ()
            if not self._fixed_on_gpu or packs_in_fixed_order(gpu_of(self.device)):
                self._packed = self._method.pack_experts(w13, w2, self.num_experts, dtype)
            if self._packed is None:
                self.w13, self.w2 = (_dequantize_stack(w, dtype) for w in (w13, w2))
            self.quantized_gemm = (
                self._packed.describe if self._packed else "dequantized when loaded"
            )
        if self._packed is None and cpu_experts_serve(self.w13):
            self._packed = pack_cpu_experts(self.w13, self.w2, self.activation)
            self.w13, self.w2 = (w.new_empty(0, *w.shape[1:]) for w in (self.w13, self.w2))
        self._shared_gate_up = [plain_gemm_for(w13) for w13 in self.w13[self.num_experts :]]
        if self._fixed_on_gpu:
            plain, gpu = self._packed is None and self.activation is None, gpu_of(self.device)
            self.in_blocks = experts_need_blocks(self._hidden_size, self.width, plain, gpu)

    @property
    def _fixed_on_gpu(self) -> bool:
        return self._fixed_order and self.device.type == "cuda"

    def routed_here(self, routed: Routed | RouterLogits) -> Routed:
        """Returns it with the choices that are this rank's experts."""
        assert isinstance(routed, Routed)
        return of_experts(routed, self.part) if self.is_part else routed

    @property
    def can_choose(self) -> bool:
        """Whether a kernel that chooses experts reads these weights."""
        can = self.activation is None if self._packed is None else self._packed.can_choose
        return can and not self.is_part

    def __call__(
        self, x: Tensor, routed: Routed | RouterLogits, shared: GatedOutput | None = None
    ) -> Tensor:
        """x [T, H] -> [k, T, H], weighted, in the order of the choices.

        Shared experts that are not among the choices are added to the first. `shared` is too, or
        comes after the last, [k + 1, T, H].
        """
        if self.is_part:
            out = self._partials(x, self.routed_here(routed), None)
            # The first choice, to which it would be added, may be another rank's.
            return out if shared is None else with_another(out, shared.result())
        chosen = isinstance(routed, RouterLogits) or routed.num_shared == self.num_shared
        assert chosen or shared is None
        return self._partials(x, routed, shared if chosen else self._shared_output(x))

    def _partials(
        self, x: Tensor, routed: Routed | RouterLogits, shared: Tensor | GatedOutput | None
    ) -> Tensor:
        """The routed experts, and the shared ones if they are among the choices."""
        if self._packed is not None:
            return self._packed.partials(x, routed, shared, self.activation)
        w13, w2 = self.w13, self.w2
        if isinstance(shared, Tensor):
            w13, w2 = w13[: self.num_experts], w2[: self.num_experts]
        return expert_partials(x, w13, w2, routed, shared, activation=self.activation)

    def _shared_output(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], by dense GEMMs."""
        if self._packed is not None and self._packed.shared_output is not None:
            return self._packed.shared_output(x)
        out: Tensor | None = None
        for gate_up, w2 in zip(self._shared_gate_up, self.w2[self.num_experts :], strict=True):
            act = gate_up.silu_and_mul(x)
            out = F.linear(act, w2) if out is None else out.addmm_(act, w2.t())
        assert out is not None
        return out


def _dequantize_stack(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[E, N, K], matrix by matrix, which takes less memory."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for expert, matrix in enumerate(out):
        matrix.copy_(weight.map(itemgetter(expert)).dequantize())
    return out


def check_has_experts(model: Module, ep_size: int, architecture: str) -> None:
    """
    Raises:
        ConfigError: there is nothing that `ep_size` divides.
    """
    if next(model.modules(Experts), None) is None:
        raise ConfigError(
            f"ep_size {ep_size} divides experts, and {architecture} has none; drop it."
        )


class SparseMoE(Module):
    """`gate` and `experts` of one layer."""

    router_type: ClassVar[type[Router]] = Router
    experts_type: ClassVar[type[Experts]] = Experts

    def __init__(
        self, hidden_size: int, intermediate_size: int, routing: Routing, place: WeightPlacement
    ) -> None:
        """`intermediate_size`: of one expert."""
        # With experts divided whole, the shared ones are narrower: an MLP of their own.
        self.shared_experts: GatedMLP | None = None
        if place.ep_size > 1 and routing.num_shared:
            width = intermediate_size * routing.num_shared
            self.shared_experts = unreduced_mlp(hidden_size, width, place)
            routing = replace(routing, num_shared=0)
        self.gate = self.router_type(hidden_size, routing, place)
        self.experts = self.experts_type(
            routing.num_experts, hidden_size, intermediate_size, place, routing.num_shared
        )
        self._comm = place.comm

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        shared = self.experts.shared_weights(f"{prefix}shared_experts.")
        return super().weights(prefix) | shared

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        return super().shards(prefix) | self.experts.shared_shards(f"{prefix}shared_experts.")

    def matrix_names(self, prefix: str = "") -> list[str]:
        """Names of the experts' matrices, in `weights` or `quantized_weights`."""
        return self.experts.matrix_names(f"{prefix}experts.", f"{prefix}shared_experts.")

    def quantized_weights(self, prefix: str = "") -> dict[str, QuantizedWeight]:
        """Those that `weights` lacks."""
        return self.experts.quantized_weights(f"{prefix}experts.", f"{prefix}shared_experts.")

    def __call__(self, x: Tensor | DeferredNorm) -> PendingExperts:
        """x [T, H] -> [T, H].

        A norm that leads here is not linked, since router and experts both read x.
        """
        assert isinstance(x, Tensor), "a norm before a router is not deferred"
        return PendingExperts(self, x, self._comm)

    def after_norm(
        self, x: Hidden, residual: Tensor, norm: AddRMSNorm
    ) -> tuple[PendingExperts, Tensor]:
        """`x, residual = norm(x, residual)` and self(x), fused for few tokens."""
        fused = None
        if self.experts.can_choose and isinstance(x, PendingGemm):
            fused = self.gate.add_norm_logits(x, residual, norm.norm, self.experts.width)
        if fused is not None:
            normed, residual, logits = fused
            return PendingExperts(self, normed, self._comm, logits), residual
        normed_or_deferred, residual = norm(x, residual)
        return self(normed_or_deferred), residual

    def partials(self, x: Tensor, logits: RouterLogits | None = None) -> Tensor:
        """x [T, H] -> [k, T, H], of this rank. `logits`: of x, if they are there."""
        if logits is None and self.experts.can_choose:
            logits = self.gate.logits_for_experts(x, self.experts.width)
        out = self.experts(x, self.gate(x) if logits is None else logits)
        if self.shared_experts is None:
            return out
        return with_another(out, self.shared_experts(x).result())


def with_another(partials: Tensor, output: Tensor) -> Tensor:
    """[k, T, H] and [T, H] -> [k + 1, T, H]."""
    return torch.cat((partials, output.unsqueeze(0).to(partials.dtype)))


def unreduced_mlp(hidden_size: int, width: int, place: WeightPlacement) -> GatedMLP:
    """An MLP of which a rank computes its part, to be summed with the experts."""
    ranks = UnreducedRank(place.comm.rank, place.comm.size)
    own = WeightPlacement(place.dtype, place.device, ranks, fixed_order=place.fixed_order)
    return GatedMLP(hidden_size, width, bias=False, place=own)


class SharedExpertMoE(SparseMoE):
    """Adds an MLP of every token, weighted by sigmoid(shared_expert_gate(x)) (Qwen2-MoE)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        shared_size: int,
        routing: Routing,
        place: WeightPlacement,
    ) -> None:
        """`shared_size`: width of the shared MLP."""
        super().__init__(hidden_size, intermediate_size, routing, place)
        self.shared_expert = unreduced_mlp(hidden_size, shared_size, place)
        self.shared_expert_gate = OutputGate(hidden_size, place)

    def partials(self, x: Tensor, logits: RouterLogits | None = None) -> Tensor:
        value = self.shared_expert(x).result()
        if logits is None and self.experts.can_choose:
            logits = self.gate.logits_for_experts(x, self.experts.width)
        routed = self.gate(x) if logits is None else logits
        gate = self.shared_expert_gate
        return self.experts(x, routed, GatedOutput(x, gate.weight, value, gate.packed))


class OutputGate(Module):
    """`weight` [1, H]: sigmoid(w · x) is one number per token."""

    def __init__(self, hidden_size: int, place: WeightPlacement) -> None:
        self.weight = place.empty(1, hidden_size)
        self.packed: cpu.PackedWeight | None = None  # of our kernels for CPUs

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}weight": self.weight}

    def prepare(self) -> None:
        if cpu_experts_serve(self.weight):
            self.packed = cpu.pack(self.weight)


class PendingExperts(Pending):
    """The output of a `SparseMoE`, not computed yet."""

    def __init__(
        self, moe: SparseMoE, x: Tensor, comm: Communicator, logits: RouterLogits | None = None
    ) -> None:
        """`logits`: the router's, if they are there."""
        self._moe, self._x, self._comm, self._logits = moe, x, comm, logits

    def result(self) -> Tensor:
        return self._reduced(self._partials())

    def add_rms_norm(
        self, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """The norm adds up the outputs of a token's experts, on one device."""
        partials = self._partials()
        if self._comm.size == 1:
            return norm.add(partials, residual)
        fuses = self._comm.peers is not None and norm.fuses_sum(partials, residual)
        own = partials if fuses else combine(partials, self._x.dtype)
        return norm.add_across(own, residual, self._comm)

    def _reduced(self, partials: Tensor) -> Tensor:
        return self._comm.all_reduce(combine(partials, self._x.dtype))

    def _partials(self) -> Tensor:
        """[k, T, H], of this rank."""
        moe, x, logits = self._moe, self._x, self._logits
        if logits is not None:  # of few tokens
            return moe.partials(x, logits)
        return by_blocks(moe.experts, len(x), lambda rows: moe.partials(x[rows]))


def by_blocks(experts: Experts, tokens: int, partials: Callable[[slice], Tensor]) -> Tensor:
    """The partials [k, T, H] of all tokens, of what gives those of some.

    Kernels that have one order of sums up to `MAX_DECODE_TOKENS` tokens alone take more of them in
    blocks of so many, each of which reads the weights again.
    """
    if not experts.in_blocks or tokens <= MAX_DECODE_TOKENS:
        return partials(slice(None))
    size = MAX_DECODE_TOKENS
    blocks = (slice(first, first + size) for first in range(0, tokens, size))
    return torch.cat([partials(rows) for rows in blocks], 1)


def choose_expert_layout(model: Module, names: Iterable[str]) -> None:
    """Takes the experts as a checkpoint of these tensors stores them; before `weights()`.

    Raises:
        ConfigError: a rank cannot read its part.
    """
    fused = any("experts.gate_up_proj" in name for name in names)  # MXFP4's have endings
    for experts in model.modules(Experts):
        experts.set_fused(fused)


def other_ranks_experts(model: Module) -> set[str]:
    """Paths of matrices that this rank leaves in the files, after `choose_expert_layout`."""
    named = model.named_modules(Experts)
    return {name for prefix, experts in named for name in experts.other_ranks(prefix)}
