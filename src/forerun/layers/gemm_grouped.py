"""Weights of codes in groups (`GroupedWeight`), kept as they are stored, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.cpu import library
from forerun.kernels.gemm.grouped import GroupedKind, GroupedWeight
from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.layers.gemm import CpuGemm
from forerun.layers.quantize_method import QuantizeMethod


@dataclass(frozen=True)
class GroupedMethod(QuantizeMethod):
    """Keeps linears, embedding and LM head, and gives the results of float32."""

    kind: GroupedKind

    keeps_vocabulary = True
    takes_int8_tokens = True

    def empty_linear(self, n: int, k: int, device: torch.device) -> GroupedWeight | None:
        if not (library.serves(torch.float32, device) and self.kind.fits(k)):
            return None
        return GroupedWeight.empty(n, k, self.kind, device)

    def gemm(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> CpuGemm:
        assert isinstance(weight, GroupedWeight)
        return CpuGemm(cpu.pack_grouped(weight, bias, dtype))
