"""GEMMs over quantized weights on a GPU.

Fp8Gemm       e4m3 weights, in a bfloat16 model: our kernels up to 128 tokens, else FP8 tensor
              cores through the library, or the weight dequantized
Int4Gemm      weights of 4-bit integers: our kernels up to 128 tokens, else the weight
              dequantized
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.elementwise.quantize_fp8 import (
    dequantize_weight,
    interleave,
    quantize_tokens,
)
from forerun.kernels.gemm.config import GemmConfig, Sm90Fp8GemmConfig, TritonGemmConfig
from forerun.kernels.gemm.dispatch import MAX_FP8_M, choose_fp8_gemm, fp8_sm90_serves
from forerun.kernels.gemm.gemm import DeferredNorm, GemmWeight
from forerun.kernels.gemm.gemm_int4 import MAX_M as MAX_INT4_M
from forerun.kernels.gemm.gemm_int4 import gemm_int4, gemm_int4_partials
from forerun.kernels.gemm.gemm_int4_sm90 import choose_config as choose_int4_sm90
from forerun.kernels.gemm.int4 import Int4Weight
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.sampling.argmax import argmax
from forerun.layers.gemm import BlockwiseGemm, Gemm, SkinnyGemm, whole
from forerun.layers.norm import RMSNorm


class Fp8Gemm(SkinnyGemm):
    """An e4m3 weight. Up to 128 tokens are multiplied in bfloat16 (W8A16): the kernels read the
    values once and convert them in registers. So nothing but the weights is rounded, and norms and
    activations stay fused.
    """

    packs_weight = True

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        self.weight = GemmWeight.from_fp8(weight, bias)
        (n, k), gpu = weight.shape, gpu_of(weight.device)
        interleaved = fp8_sm90_serves(n, k, gpu, self.weight.group)
        if interleaved:
            weight = replace(weight, values=interleave(weight.values))
            self.weight = replace(self.weight, weight=weight.values)
        self._library = Fp8LibraryGemm(weight, bias, interleaved)

    def describe_quantized(self) -> str | None:
        language = "Triton" if isinstance(self._config(1), TritonGemmConfig) else "CUDA C++"
        few = f"up to {MAX_FP8_M} tokens W8A16 in {language}, more " if self._config(1) else ""
        return f"fp8: {few}{self._library.describe_quantized()}"

    def in_fixed_order(self) -> Gemm | None:
        """Blocks of tokens on Hopper, whose kernel splits K by the shape alone; else None."""
        serves = isinstance(self._config(1), Sm90Fp8GemmConfig)
        return BlockwiseGemm(self, MAX_FP8_M) if serves else None

    def _config(self, num_tokens: int, partials: bool = False) -> GemmConfig | None:
        (n, k), gpu = self.weight.weight.shape, gpu_of(self.weight.weight.device)
        return choose_fp8_gemm(n, k, num_tokens, gpu, self.weight.group, partials)

    def _silu_mul_config(self, num_tokens: int) -> GemmConfig | None:
        return self._config(num_tokens)

    def argmax(self, x: Tensor) -> Tensor:
        return argmax(self(x))


class Fp8LibraryGemm(Gemm):
    """Many tokens. With a scale per row, where the GPU has FP8 tensor cores, tokens are quantized
    too (W8A8, a scale per token); else the weight is dequantized for every call.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, interleaved: bool) -> None:
        """`interleaved`: the weight's values are stored so."""
        self.weight, self.bias, self._interleaved = weight, bias, interleaved
        self._scaled_mm = _scaled_mm_serves(weight)
        self._scales = weight.scales.t().contiguous()  # [1, N] where it serves

    def describe_quantized(self) -> str:
        return "W8A8 in the library" if self._scaled_mm else "dequantized for every GEMM"

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        x = whole(x)
        if not self._scaled_mm:
            return F.linear(
                x, dequantize_weight(self.weight, x.dtype, self._interleaved), self.bias
            )
        values, scales = quantize_tokens(x, self._interleaved)
        weight = self.weight.values.t()
        y: Tensor = torch._scaled_mm(
            values, weight, scales, self._scales, bias=self.bias, out_dtype=x.dtype
        )
        return y


class Int4Gemm(Gemm):
    """A weight of 4-bit integers. Up to 128 tokens are multiplied by kernels that read them once
    (W4A16); for more, it is dequantized for every call.
    """

    packs_weight = True

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        self.weight = weight.pack(bias)

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        return gemm_int4(whole(x), self.weight)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """The norm adds up split-K partials."""
        partials = self.split_k_partials(x)
        return norm.add(self(x) if partials is None else partials, residual)

    def split_k_partials(self, x: Tensor, free_smem: int = 0) -> Tensor | None:
        return None if self.weight.bias is not None else gemm_int4_partials(x, self.weight)

    def silu_and_mul(self, x: Tensor | DeferredNorm) -> Tensor:
        return gemm_int4(whole(x), self.weight, silu_mul=True)

    def in_fixed_order(self) -> Gemm | None:
        """Blocks of tokens on Hopper, whose kernel divides K by the shape alone; else None."""
        gpu, bfloat16 = gpu_of(self.weight.packed.device), torch.bfloat16
        forms = (
            choose_int4_sm90(*self.weight.shape, silu, gpu, bfloat16) for silu in (False, True)
        )
        return BlockwiseGemm(self, MAX_INT4_M) if all(forms) else None

    def describe_quantized(self) -> str:
        packed, bfloat16 = self.weight.packed, torch.bfloat16
        config = choose_int4_sm90(*self.weight.shape, False, gpu_of(packed.device), bfloat16)
        language = "Triton" if config is None else "CUDA C++"
        return (
            f"int4: up to {MAX_INT4_M} tokens W4A16 in {language}, more dequantized for every GEMM"
        )


def _scaled_mm_serves(weight: Fp8Weight) -> bool:
    gpu, (n, k) = gpu_of(weight.device), weight.shape
    fp8_cores = not gpu.amd and gpu.capability >= 90
    return fp8_cores and weight.scales.shape[1] == 1 and n % 16 == 0 and k % 16 == 0
