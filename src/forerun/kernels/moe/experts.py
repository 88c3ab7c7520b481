"""The experts of a mixture of experts: y = Σ_j weight_j · down(silu(gate(x)) · up(x)).

Every expert has a gate/up matrix and a down matrix, stacked in `w13` [E, 2I, H] (gate rows before
up rows) and `w2` [E, H, I].
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.elementwise.silu_mul import silu_mul_ref
from forerun.kernels.moe.routing import Routed


def experts_ref(x: Tensor, w13: Tensor, w2: Tensor, routed: Routed) -> Tensor:
    """Reference implementation: x [T, H] -> [T, H], one GEMM per expert and nothing on the host.

    The k outputs of a token are weighted and summed in float32.
    """
    (tokens, top_k), num_experts = routed.experts.shape, len(w13)
    ids = routed.experts.flatten()
    order = ids.argsort(stable=True)  # (token, rank) pairs, by expert
    expert = torch.arange(num_experts, device=ids.device).unsqueeze(1)
    ends = (ids <= expert).sum(1, dtype=torch.int32)  # [E], where each expert's pairs end
    gate_up = torch._grouped_mm(x[order // top_k], w13.transpose(1, 2), offs=ends)
    act = silu_mul_ref(gate_up, x.dtype)
    sorted_out = torch._grouped_mm(act, w2.transpose(1, 2), offs=ends)
    out = sorted_out[order.argsort()].view(tokens, top_k, -1)
    return (out.float() * routed.weights.unsqueeze(-1)).sum(1).to(x.dtype)
