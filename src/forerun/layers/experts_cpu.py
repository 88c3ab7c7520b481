"""Experts on a CPU: packed, and computed by our kernels in C++ (`kernels/cpu/experts.py`)."""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu.experts import Activation
from forerun.kernels.cpu.experts import PackedExperts as CpuExperts
from forerun.kernels.cpu.gemm import PackedWeights
from forerun.kernels.moe.experts import ClampedSwiglu, ExpertActivation
from forerun.kernels.moe.gated_output import GatedOutput
from forerun.kernels.moe.routing import Routed, RouterLogits
from forerun.kernels.runtime.jit import use_triton
from forerun.layers.quantize_method import PackedExperts


def cpu_experts_serve(weight: Tensor) -> bool:
    """Whether plain weights like this one [.., K] are computed with by our kernels."""
    return library.serves(weight.dtype, weight.device) and not use_triton(weight)


def pack_cpu_experts(w13: Tensor, w2: Tensor, activation: ExpertActivation) -> PackedExperts:
    """The experts [E, 2I, H] and [E, H, I], routed and shared ones, where `cpu_experts_serve`."""
    if isinstance(activation, ClampedSwiglu):
        packed = PackedWeights.pack(w13, activation.b13), PackedWeights.pack(w2, activation.b2)
        experts = CpuExperts(*packed, Activation.CLAMPED, activation.alpha, activation.limit)
    else:
        kind = Activation.SILU if activation is None else Activation.GELU_TANH
        experts = CpuExperts(PackedWeights.pack(w13), PackedWeights.pack(w2), kind)

    return PackedExperts(
        "own kernels in C++", lambda x, *rest: expert_partials_cpu(x, experts, *rest)
    )


def expert_partials_cpu(
    x: Tensor,
    experts: CpuExperts,
    routed: Routed | RouterLogits,
    shared: Tensor | GatedOutput | None,
    activation: ExpertActivation,
) -> Tensor:
    """`expert_partials` of packed experts, which know their activation: [1, T, H] float32."""
    assert isinstance(routed, Routed)
    out = experts(x, routed.experts, routed.weights)
    if shared is not None:
        out += shared if isinstance(shared, Tensor) else shared.result()
    return out.unsqueeze(0)
