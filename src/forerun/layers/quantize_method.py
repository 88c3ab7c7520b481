"""How layers keep quantized weights, and what computes with them.

A `QuantizeMethod` (vLLM, SGLang: LinearMethodBase and FusedMoEMethodBase) is one kind of quantized
weight. Layers ask it for memory before they are loaded and for kernels after, and know no kind by
name. What it declines is plain: dequantized while it is loaded, or when it is prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.kernels.moe.experts import ExpertActivation
from forerun.kernels.moe.gated_output import GatedOutput
from forerun.kernels.moe.routing import Routed, RouterLogits
from forerun.layers.gemm import Gemm

if TYPE_CHECKING:
    from forerun.layers.moe import Experts


@dataclass(frozen=True)
class PackedExperts:
    """The weights of a layer's experts, as kernels read them."""

    describe: str  # what computes with them, by tokens
    # x [T, H], choices, shared output, activation -> [k, T, H], as `expert_partials`
    partials: Callable[
        [Tensor, Routed | RouterLogits, Tensor | GatedOutput | None, ExpertActivation], Tensor
    ]
    shared_output: Callable[[Tensor], Tensor] | None = None  # x [T, H] -> [T, H], if some are kept
    can_choose: bool = False  # whether the kernel chooses experts from the router's logits


class QuantizeMethod:
    """A kind of quantized weight. The defaults keep and compute nothing."""

    keeps_vocabulary: ClassVar[bool] = False  # embedding and LM head, too; only with `CpuGemm`
    # With the setting `quantization` int8, too: kernels multiply the weight by tokens of 8 bits.
    takes_int8_tokens: ClassVar[bool] = False

    def empty_linear(self, n: int, k: int, device: torch.device) -> QuantizedWeight | None:
        """Memory for a linear's weight [N, K], uninitialised; None: it is kept plain."""
        return None

    def gemm(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Gemm | None:
        """A GEMM over a loaded weight of this kind, x and y of `dtype`; None: no kernel reads it
        here, and it is dequantized once.
        """
        return None

    def empty_experts(self, experts: Experts) -> tuple[QuantizedWeight, QuantizedWeight] | None:
        """Memory in the place of `w13` and `w2`, uninitialised; None: they are kept plain."""
        return None

    def pack_experts(
        self, w13: QuantizedWeight, w2: QuantizedWeight, num_experts: int, dtype: torch.dtype
    ) -> PackedExperts | None:
        """Loaded weights for a kernel, `num_experts` of them routed; None: they are dequantized."""
        return None
