"""Experts with weights in e4m3: which kernels read them, for how many tokens."""

from __future__ import annotations

from operator import itemgetter

import torch
from torch import Tensor

from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.kernels.moe.config import MAX_DECODE_TOKENS, choose_moe_fp8, choose_moe_fp8_sm90
from forerun.kernels.moe.experts import ExpertActivation
from forerun.kernels.moe.experts_fp8 import expert_partials_fp8
from forerun.kernels.moe.fp8_matrices import Fp8Matrices
from forerun.kernels.moe.gated_output import GatedOutput
from forerun.kernels.moe.routing import Routed, RouterLogits
from forerun.kernels.runtime.gpu import gpu_of, have_triton
from forerun.layers.gemm_quantized import Fp8LibraryGemm
from forerun.layers.quantize_method import PackedExperts


def fp8_experts_serve(w13: Fp8Weight, w2: Fp8Weight, dtype: torch.dtype) -> bool:
    """Whether kernels read these weights; `dtype`: of x."""
    fits = Fp8Matrices.fits(w13) and Fp8Matrices.fits(w2)
    return fits and dtype == torch.bfloat16 and have_triton(w13.device.type)


def pack_fp8_experts(w13: Fp8Weight, w2: Fp8Weight, num_experts: int) -> PackedExperts:
    """Packs `w13` [E + n, 2I, H] and `w2` [E + n, H, I] of E routed and n shared experts.

    `num_experts`: the routed ones.
    """
    (_, hidden, width), gpu = w2.shape, gpu_of(w2.device)
    sm90 = choose_moe_fp8_sm90(1, hidden, width, torch.bfloat16, gpu)
    on_sm90 = sm90 is not None  # up to 128 tokens are the kernel's for Hopper
    packed = Fp8Matrices.pack(w13, on_sm90), Fp8Matrices.pack(w2, on_sm90)
    shared = [
        [Fp8LibraryGemm(w.map(itemgetter(expert)), None, on_sm90) for w in (w13, w2)]
        for expert in range(num_experts, len(w13.values))
    ]

    def partials(
        x: Tensor,
        routed: Routed | RouterLogits,
        added: Tensor | GatedOutput | None,
        activation: ExpertActivation,
    ) -> Tensor:
        assert activation is None
        return expert_partials_fp8(x, *packed, routed, added)

    def shared_output(x: Tensor) -> Tensor:
        """Dense GEMMs."""
        outs = [down(gate_up.silu_and_mul(x)) for gate_up, down in shared]
        return outs[0] if len(outs) == 1 else torch.stack(outs).sum(0)

    few = f"up to {MAX_DECODE_TOKENS} tokens W8A16 in {'CUDA C++' if on_sm90 else 'Triton'}"
    many = "W8A8" if choose_moe_fp8(MAX_DECODE_TOKENS + 1, gpu).quantize_x else "W8A16"
    return PackedExperts(
        f"fp8 experts: {few}, more {many} in Triton", partials, shared_output, on_sm90
    )
