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


class Fp8Experts(PackedExperts):
    """`w13` [E + n, 2I, H] and `w2` [E + n, H, I] of E routed and n shared experts."""

    def __init__(self, w13: Fp8Weight, w2: Fp8Weight, num_experts: int) -> None:
        """`num_experts`: the routed ones."""
        (_, hidden, width), gpu = w2.shape, gpu_of(w2.device)
        sm90 = choose_moe_fp8_sm90(1, hidden, width, torch.bfloat16, gpu)
        # Up to 128 tokens are the kernel's for Hopper.
        self.can_choose = self._on_sm90 = sm90 is not None
        self._w13, self._w2 = (Fp8Matrices.pack(w, self._on_sm90) for w in (w13, w2))
        self._shared = [
            (self._library_gemm(w13, expert), self._library_gemm(w2, expert))
            for expert in range(num_experts, len(w13.values))
        ]

    def describe(self) -> str:
        language = "CUDA C++" if self._on_sm90 else "Triton"
        few = f"up to {MAX_DECODE_TOKENS} tokens W8A16 in {language}"
        quantize_x = choose_moe_fp8(
            MAX_DECODE_TOKENS + 1, gpu_of(self._w13.values.device)
        ).quantize_x
        return f"fp8 experts: {few}, more {'W8A8' if quantize_x else 'W8A16'} in Triton"

    def partials(
        self,
        x: Tensor,
        routed: Routed | RouterLogits,
        shared: Tensor | GatedOutput | None,
        activation: ExpertActivation,
    ) -> Tensor:
        assert activation is None
        return expert_partials_fp8(x, self._w13, self._w2, routed, shared)

    def shared_output(self, x: Tensor) -> Tensor:
        """Does it by dense GEMMs."""
        outs = [down(gate_up.silu_and_mul(x)) for gate_up, down in self._shared]
        return outs[0] if len(outs) == 1 else torch.stack(outs).sum(0)

    def _library_gemm(self, weight: Fp8Weight, expert: int) -> Fp8LibraryGemm:
        return Fp8LibraryGemm(weight.map(itemgetter(expert)), None, self._on_sm90)
